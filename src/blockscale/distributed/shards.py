"""Shards of a matrix, quantized so that together they have the bytes of the whole one quantized at
once."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..formats import get_format
from ..layouts import TILE_ROWS
from ..nn.forms import quantize_forms
from ..ops.operand_layout import operand_layout
from ..ops.quantize import global_scale
from ..quantize import quantize
from ..tensor import ScaledTensor
from .functional_collectives import all_gather_tensor, all_reduce, name_of
from .shard_ops import gather_operand
from .writes import Version

__all__ = ["How", "Kept", "Shards", "warn_of_cut_blocks"]


class How(NamedTuple):
    """How a product reads a matrix: its format, and the rounding of its scales.

    Attributes:
        mesh: its ranks have other parts of the matrix, beside those of the group that gathers.
    """

    format: str
    scale_rounding: str | None
    mesh: DeviceMesh | None = None

    @property
    def rows(self) -> int:
        """How many rows a shard has, or a multiple: whole blocks along either axis."""
        return max(get_format(self.format).block)

    def quantize(
        self, x: Tensor, axis: int, global_scale: Tensor | None, layout: str = "compact"
    ) -> ScaledTensor:
        rounding = self.scale_rounding
        how: dict[str, Any] = {"global_scale": global_scale, "layout": layout, "pad": True}
        return quantize(x, self.format, axis, scale_rounding=rounding, **how)

    def travelling(self, shard: Tensor) -> str:
        """The layout in which scales of a shard (rows, K) travel, below which others lie: tiles
        where products read them, and it has whole ones; else compact."""
        layout = operand_layout(self.format, shard.device).layout
        return layout if layout == "tcgen05" and shard.shape[0] % TILE_ROWS == 0 else "compact"

    def global_scale(self, shard: Tensor, group: dist.ProcessGroup) -> Tensor | None:
        """Ranks find the global scale of the whole, which is the largest of their shards', as it
        rises with amax. Shards without values, as of empty ranks, have none."""
        if not get_format(self.format).has_global_scale:
            return None
        found = global_scale(shard if shard.numel() else shard.new_zeros(1, 1), self.format)
        found = torch.where((shard.isfinite() & (shard != 0)).any(), found, 0)
        for each in (group, *(() if self.mesh is None else (self.mesh.get_group(),))):
            found = all_reduce(found, "max", each)
        return torch.where(found == 0, 1, found)


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
        self.kept: dict[How | None, Kept] = {}
        self._rows: dict[How, ScaledTensor] = {}
        self._scales: dict[How, Tensor | None] = {}

    def rows(self, how: How) -> ScaledTensor:
        """Kept: layers that share an input read it one after another."""
        if how not in self._rows:
            self._rows[how] = self.place.gather(self.quantize(how, -1))
        return self._rows[how]

    def keep(self, how: How | None) -> Kept:
        """What the gradient of a weight reads later: columns, or where there is no ``how`` rows in
        high precision. Layers that share an input share it."""
        if how not in self.kept:
            self.kept[how] = Kept(self, how)
        return self.kept[how]

    def plain(self) -> Tensor:
        """The whole as it is, of its shape."""
        return self.place.gather_plain(self.x)

    def quantize(self, how: How, axis: int) -> ScaledTensor:
        matrix = self.x.reshape(-1, self.x.shape[-1]).contiguous()
        if how not in self._scales:
            self._scales[how] = how.global_scale(matrix, self.place.group)
        layout = how.travelling(matrix) if self.place.pieces == 1 else "compact"
        return how.quantize(matrix, axis, self._scales[how], layout)


class Kept:
    """A shard that a backward gathers, until it is forgotten once. It is quantized in the forward,
    so that whoever writes to the input then changes nothing; where it stays as it is such a write
    is an error."""

    def __init__(self, shards: Shards, how: How | None) -> None:
        self._place, self._how = shards.place, how
        self._whole: Tensor | None = None
        self._shard: Tensor = shards.x
        if how is not None and shards.place.rows % how.rows:
            warn_of_cut_blocks(shards.place.whole, shards.place.ranks, how)
        elif how is not None:
            self._shard = shards.quantize(how, -2)
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
        matrix, how = values.reshape(-1, values.shape[-1]), self._how
        if how is None:
            return matrix
        found = quantize_forms(matrix, *how[:2], columns=True).columns
        assert found is not None
        return found


_warned = False


def warn_of_cut_blocks(size: tuple[int, ...], ranks: int, how: How) -> None:
    """Once."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"a tensor {tuple(size)} over {ranks} ranks is gathered in high precision: "
            f"{how.format} has blocks of {how.rows}, and ranks would cut them. (Said once.)",
            UserWarning,
            stacklevel=4,
        )
