"""Scales of experts: every group of rows starts on a 128-row tile of its own.

Group g has rows ``offsets[g-1]`` to ``offsets[g]``; its tiles follow those of the groups before it.
The buffer has room for a partial tile in each group, so that its size is known on the host while
the offsets stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Layout, as_bytes, ceil_to, check_scale
from .tcgen05 import TILE_ROWS

__all__ = ["Grouped"]


@dataclass(frozen=True)
class Grouped:
    """``base`` over rows that are moved apart so that every group starts on a 128-row tile.

    ``offsets`` is an int32 tensor (groups,): the end row of each group, ascending; the last one may
    be smaller than the number of rows (the rest belongs to nobody and is not stored).
    """

    base: Layout

    @property
    def name(self) -> str:
        return f"{self.base.name}+grouped"

    def padded_rows(self, rows: int, groups: int) -> int:
        """Rows of the buffer: the most that so many groups can need, a multiple of 128."""
        return (rows + groups * (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS

    def row_index(self, rows: int, offsets: Tensor) -> Tensor:
        """Where each of the ``rows`` is stored (int64, on the device of ``offsets``, no sync).

        Rows past the last offset get the index ``padded_rows`` (outside of the buffer).
        """
        ends = offsets.to(torch.int64)
        starts = torch.cat((ends.new_zeros(1), ends[:-1]))
        tiles = (ends - starts + TILE_ROWS - 1) // TILE_ROWS
        first = (torch.cumsum(tiles, 0) - tiles) * TILE_ROWS
        row = torch.arange(rows, device=offsets.device)
        group = torch.searchsorted(ends, row, right=True)
        inside = group < len(ends)
        group = group.clamp(max=len(ends) - 1)
        outside = self.padded_rows(rows, len(ends))
        return torch.where(inside, first[group] + row - starts[group], outside)

    def swizzle(self, scale: Tensor, offsets: Tensor) -> Tensor:
        """(rows, blocks) -> the base layout of ``padded_rows`` rows, padding zero."""
        check_scale(self.base, scale)
        rows, blocks = scale.shape
        height = self.padded_rows(rows, len(offsets))
        spread = as_bytes(scale).new_zeros(height + 1, blocks)
        spread[self.row_index(rows, offsets)] = as_bytes(scale)
        return self.base.swizzle(spread[:height].view(scale.dtype))

    def unswizzle(
        self, stored: Tensor, shape: tuple[int, int], dtype: torch.dtype, offsets: Tensor
    ) -> Tensor:
        """The (rows, blocks) matrix back; rows that belong to no group are zero."""
        rows, blocks = shape
        height = self.padded_rows(rows, len(offsets))
        spread = as_bytes(self.base.unswizzle(stored, (height, blocks), dtype))
        spread = torch.cat((spread, spread.new_zeros(1, blocks)))
        return spread[self.row_index(rows, offsets)].view(dtype)

    def stored_shape(self, shape: tuple[int, int], groups: int) -> tuple[int, ...]:
        return self.base.stored_shape((self.padded_rows(shape[0], groups), shape[1]))

    def nbytes(self, shape: tuple[int, int], groups: int, itemsize: int | None = None) -> int:
        return self.base.nbytes((self.padded_rows(shape[0], groups), shape[1]), itemsize)

    def offset(
        self,
        row: int,
        block: int,
        shape: tuple[int, int],
        offsets: Sequence[int],
        itemsize: int | None = None,
    ) -> int:
        """Byte offset of scale (row, block); ValueError where the row is in no group."""
        start, first = 0, 0
        for end in offsets:
            if row < end:
                height = self.padded_rows(shape[0], len(offsets))
                return self.base.offset(first + row - start, block, (height, shape[1]), itemsize)
            first, start = first + ceil_to(end - start, TILE_ROWS), end
        raise ValueError(f"row: got {row}; the groups end at row {start}")

    def describe(self) -> str:
        return f"every group starts on a 128-row tile; {self.base.describe()}"
