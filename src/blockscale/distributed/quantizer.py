"""How ranks quantize shards so that together they have the bytes of the whole matrix quantized at
once."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..formats import get_format
from ..layouts import TILE_ROWS
from ..nn.operand import Operand
from ..ops.operand_layout import operand_layout
from ..ops.quantize import global_scale
from ..quantize import quantize
from ..tensor import ScaledTensor
from .functional_collectives import all_reduce

__all__ = ["Quantizer", "warn_of_cut_blocks"]


class Quantizer(NamedTuple):
    """Quantizes shards of a matrix, as the product has it that reads it: neither transformed nor
    rounded stochastically, by one global scale.

    Attributes:
        mesh: its ranks have other parts of the matrix, beside those of the group that gathers.
    """

    operand: Operand
    mesh: DeviceMesh | None = None

    @property
    def format(self) -> str:
        return self.operand.format

    @property
    def alignment(self) -> int:
        """Rows and columns of a shard are a multiple of this: whole blocks along either axis."""
        return max(get_format(self.format).block)

    def quantize(
        self, x: Tensor, axis: int, global_scale: Tensor | None, layout: str = "compact"
    ) -> ScaledTensor:
        # columns lie in memory as products read them: to turn them later costs as much again
        k_major = axis == -2 and operand_layout(self.format, x.device).k_major
        how: dict[str, Any] = {"global_scale": global_scale, "layout": layout, "pad": True}
        quantization = self.operand.rows if axis == -1 else self.operand.columns
        how |= {"square": quantization.square, "scaling": quantization.scaling}
        rounding = self.operand.scale_rounding
        return quantize(x, self.format, axis, scale_rounding=rounding, k_major=k_major, **how)

    def travelling_layout(self, shard: Tensor) -> str:
        """The layout in which scales of a shard (rows, K) travel, below which others lie: tiles
        where products read them, and it has whole ones; else compact."""
        layout = operand_layout(self.format, shard.device).layout
        return layout if layout == "tcgen05" and shard.shape[0] % TILE_ROWS == 0 else "compact"

    def global_scale(self, shard: Tensor, group: dist.ProcessGroup) -> Tensor | None:
        """Ranks find the global scale of the whole, which is the largest of their shards', as it
        rises with amax. Shards without values, as of empty ranks, have none."""
        if not get_format(self.format).has_global_scale:
            return None
        some = shard if shard.numel() else shard.new_zeros(1, 1)
        found = global_scale(some, self.format, scaling=self.operand.rows.scaling)
        found = torch.where((shard.isfinite() & (shard != 0)).any(), found, 0)
        for each in (group, *(() if self.mesh is None else (self.mesh.get_group(),))):
            found = all_reduce(found, "max", each)
        return torch.where(found == 0, 1, found)


_warned = False


def warn_of_cut_blocks(name: str, size: tuple[int, ...], ranks: int, quantizer: Quantizer) -> None:
    """Once."""
    global _warned
    if not _warned:
        _warned, block = True, quantizer.alignment
        warnings.warn(
            f"{name} {tuple(size)} over {ranks} ranks is gathered in high precision: "
            f"{quantizer.format} has blocks of {block}, and ranks would cut them; rows of a "
            f"multiple of {ranks * block} are gathered quantized. (Said once.)",
            UserWarning,
            stacklevel=4,
        )
