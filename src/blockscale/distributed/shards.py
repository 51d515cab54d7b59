"""Shards of activations, and of gradients: gathered quantized when a product reads them, and kept
for the backward."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..nn.forms import quantize_forms
from ..tensor import ScaledTensor
from .functional_collectives import all_gather_tensor, name_of
from .quantizer import Quantizer, warn_of_cut_blocks
from .shard_ops import gather_operand
from .version import Version

__all__ = ["Kept", "Shards"]


class Place(NamedTuple):
    """Where shards come together: each of such a shape, along ``dim``, those of the group."""

    shape: torch.Size
    dim: int
    group: dist.ProcessGroup

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def whole(self) -> torch.Size:
        *lead, here = self.shape[: self.dim + 1]
        return torch.Size((*lead, here * self.ranks, *self.shape[self.dim + 1 :]))

    @property
    def rows(self) -> int:
        """That lie below each other, in the whole as in a shard."""
        return math.prod(self.shape[self.dim : -1])

    @property
    def pieces(self) -> int:
        """So many of these are in a shard, and lie apart in the whole."""
        return math.prod(self.shape[: self.dim])

    def gather_plain(self, shard: Tensor) -> Tensor:
        """The whole in high precision, of its shape."""
        return all_gather_tensor(shard, self.dim, self.group)

    def gather(self, shard: ScaledTensor) -> ScaledTensor:
        """The whole matrix, as products read it."""
        return gather_operand(shard, self.rows, self.ranks, name_of(self.group))


class Shards:
    """A matrix of whose rows ranks have shards, gathered when a product reads it, by the axis that
    it reads.

    Args:
        x: (..., s, K), this rank's, of as many ranks along ``dim``; all dimensions but the last are
            rows.
        dim: not the last.
        group: of torch.distributed.
    """

    def __init__(self, x: Tensor, dim: int, group: dist.ProcessGroup) -> None:
        self.x, self.place = x, Place(x.shape, dim, group)
        self.kept: dict[Quantizer | None, Kept] = {}
        self._rows: dict[Quantizer, ScaledTensor] = {}
        self._scales: dict[Quantizer, Tensor | None] = {}

    def rows(self, quantizer: Quantizer) -> ScaledTensor:
        """Kept: layers that share an input read it one after another."""
        if quantizer not in self._rows:
            self._rows[quantizer] = self.place.gather(self.quantize(quantizer, -1))
        return self._rows[quantizer]

    def keep(self, quantizer: Quantizer | None) -> Kept:
        """What the gradient of a weight reads later: columns, or where there is no ``quantizer``
        rows in high precision. Layers that share an input share it."""
        if quantizer not in self.kept:
            self.kept[quantizer] = Kept(self, quantizer)
        return self.kept[quantizer]

    def plain(self) -> Tensor:
        """The whole as it is, of its shape."""
        return self.place.gather_plain(self.x)

    def quantize(self, quantizer: Quantizer, axis: int) -> ScaledTensor:
        matrix = self.x.reshape(-1, self.x.shape[-1]).contiguous()
        if quantizer not in self._scales:
            self._scales[quantizer] = quantizer.global_scale(matrix, self.place.group)
        layout = quantizer.travelling_layout(matrix) if self.place.pieces == 1 else "compact"
        return quantizer.quantize(matrix, axis, self._scales[quantizer], layout)


class Kept:
    """A shard that a backward gathers, until it is forgotten once. It is quantized in the forward,
    so that whoever writes to the input then changes nothing; where it stays as it is such a write
    is an error."""

    def __init__(self, shards: Shards, quantizer: Quantizer | None) -> None:
        self._place, self._quantizer = shards.place, quantizer
        self._whole: Tensor | None = None
        self._shard: Tensor = shards.x
        if quantizer is not None and shards.place.rows % quantizer.alignment:
            warn_of_cut_blocks("an input", shards.place.whole, shards.place.ranks, quantizer)
        elif quantizer is not None:
            self._shard = shards.quantize(quantizer, -2)
        self._version = Version(shards.x)

    def whole(self) -> Tensor:
        """A matrix, as the product reads it."""
        if self._whole is None:
            self._whole = self._gather()
        return self._whole

    def forget(self) -> None:
        self._whole = None

    def _gather(self) -> Tensor:
        if isinstance(self._shard, ScaledTensor):
            return self._place.gather(self._shard)
        if not self._version.is_of(self._shard):
            raise RuntimeError(
                f"x: a layer over ranks keeps its input {tuple(self._shard.shape)} for the "
                "backward, and it was modified by an in-place operation; write to a copy"
            )
        values = self._place.gather_plain(self._shard)
        matrix, quantizer = values.reshape(-1, values.shape[-1]), self._quantizer
        if quantizer is None:
            return matrix
        found = quantize_forms(matrix, quantizer.operand, columns=True).columns
        assert found is not None
        return found
