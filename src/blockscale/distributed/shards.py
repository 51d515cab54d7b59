"""Shards of a matrix, quantized so that together they have the bytes of the whole one quantized at
once."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..formats import get_format
from ..nn.forms import Forms, quantize_forms
from ..ops.operand_layout import operand_layout
from ..ops.quantize import global_scale
from ..quantize import quantize
from ..tensor import ScaledTensor
from .collectives import all_gather
from .plain import gathered

__all__ = ["How", "Shards", "as_operand", "warn_of_cut_blocks"]


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

    def quantize(self, x: Tensor, axis: int, global_scale: Tensor | None) -> ScaledTensor:
        rounding = self.scale_rounding
        return quantize(
            x, self.format, axis, scale_rounding=rounding, global_scale=global_scale, pad=True
        )

    def global_scale(self, shard: Tensor, group: dist.ProcessGroup) -> Tensor | None:
        """Of the whole: the largest of those of shards that have one, as it rises with amax."""
        if not get_format(self.format).has_global_scale:
            return None
        found = global_scale(shard, self.format)
        found = torch.where((shard.isfinite() & (shard != 0)).any(), found, 0)
        for each in (group, *(() if self.mesh is None else (self.mesh.get_group(),))):
            dist.all_reduce(found, dist.ReduceOp.MAX, each)
        return torch.where(found == 0, 1, found)


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
        self.x, self.dim, self.group = x, dim, group
        self.ranks = dist.get_world_size(group)
        self._columns: dict[How, ScaledTensor] = {}

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""
        *lead, here = self.x.shape[: self.dim + 1]
        return torch.Size((*lead, here * self.ranks, *self.x.shape[self.dim + 1 :]))

    def forms(self, how: How, *, rows: bool = False, columns: bool = False) -> Forms:
        """The whole (M, K), as products read it. Columns are kept until ``forget``: layers that
        share an input ask for them one after another."""
        found = Forms(self._gather(how, -1) if rows else None)
        if not columns:
            return found
        if how not in self._columns:
            self._columns[how] = self._gather(how, -2)
        return found._replace(columns=self._columns[how])

    def forget(self) -> None:
        self._columns.clear()

    def plain(self) -> Tensor:
        """The whole as it is, of its shape."""
        return gathered(self.x, self.dim, self.group)

    def _gather(self, how: How, axis: int) -> ScaledTensor:
        here, pieces = math.prod(self.x.shape[self.dim : -1]), math.prod(self.x.shape[: self.dim])
        matrix = self.x.reshape(-1, self.x.shape[-1])
        if axis == -2 and here % how.rows:
            warn_of_cut_blocks(self.shape, self.ranks, how)
            return self._whole_columns(how)
        shard = how.quantize(matrix, axis, how.global_scale(matrix, self.group))
        whole = all_gather(shard, 0, self.group)
        if pieces > 1:  # the ranks' shards of each lie one after another
            steps = [
                whole[start : start + here]
                for piece in range(pieces)
                for start in range(piece * here, whole.shape[0], pieces * here)
            ]
            joined: ScaledTensor = torch.cat(steps)  # type: ignore[assignment]
            whole = joined
        return as_operand(whole)

    def _whole_columns(self, how: How) -> ScaledTensor:
        whole = self.plain()
        matrix = whole.reshape(-1, whole.shape[-1])
        forms = quantize_forms(matrix, how.format, how.scale_rounding, columns=True)
        assert forms.columns is not None
        return forms.columns


def as_operand(whole: ScaledTensor) -> ScaledTensor:
    """In memory as products want it."""
    layout, k_major = operand_layout(whole.format_name, whole.device)
    if whole.axis == -2 and k_major:
        whole = whole._with(data=whole.qdata.mT.contiguous().mT)
    return whole.to_layout(layout)


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
