"""Scales of experts: every group of rows starts on a 128-row tile of its own.

Group g has rows ``offsets[g-1]`` to ``offsets[g]``; its tiles follow those of the groups before it.
The buffer has room for a partial tile in each group, so that its size is known on the host while
the offsets stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..arrays import Array, device_of, namespace, zero_padded
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

    def row_index(self, rows: int, offsets: Array) -> Array:
        """Where each of the ``rows`` is stored (int64, on the device of ``offsets``, no sync).

        Rows past the last offset get the index ``padded_rows`` (outside of the buffer).
        """
        xp, ends = namespace(offsets), _as_int64(offsets)
        starts, first = _starts(ends)
        row = xp.arange(rows, device=device_of(offsets))
        group = xp.searchsorted(ends, row, side="right")
        outside = self.padded_rows(rows, ends.shape[0])
        within = xp.clip(group, max=ends.shape[0] - 1)
        stored = xp.take(first - starts, within, axis=0) + row
        return xp.where(group < ends.shape[0], stored, outside)

    def _source_row(self, rows: int, offsets: Array) -> Array:
        """The inverse: the row that each of the ``padded_rows`` holds; ``rows`` of padding."""
        xp, ends = namespace(offsets), _as_int64(offsets)
        starts, first = _starts(ends)
        stored = xp.arange(self.padded_rows(rows, ends.shape[0]), device=device_of(offsets))
        group = xp.searchsorted(first, stored, side="right") - 1
        row = xp.take(starts - first, group, axis=0) + stored
        return xp.where(row < xp.take(ends, group, axis=0), row, rows)

    def swizzle(self, scale: Array, offsets: Array) -> Array:
        """(rows, blocks) -> the base layout of ``padded_rows`` rows, padding zero."""
        check_scale(self.base, scale)
        spread = _taken(as_bytes(scale), self._source_row(scale.shape[0], offsets))
        return self.base.swizzle(spread.view(scale.dtype))

    def unswizzle(self, stored: Array, shape: tuple[int, int], dtype: Any, offsets: Array) -> Array:
        """The (rows, blocks) matrix back; rows that belong to no group are zero."""
        rows, blocks = shape
        height = self.padded_rows(rows, offsets.shape[0])
        spread = as_bytes(self.base.unswizzle(stored, (height, blocks), dtype))
        return _taken(spread, self.row_index(rows, offsets)).view(dtype)

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


def _as_int64(offsets: Array) -> Array:
    xp = namespace(offsets)
    return xp.astype(offsets, xp.int64)


def _starts(ends: Array) -> tuple[Array, Array]:
    """The first row of each group, and where it is stored."""
    xp = namespace(ends)
    starts = xp.concat([xp.zeros_like(ends[:1]), ends[:-1]])
    rows = (ends - starts + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    return starts, xp.cumulative_sum(rows) - rows


def _taken(x: Array, rows: Array) -> Array:
    """These rows of a matrix; the index after the last one gives zeros."""
    xp = namespace(x)
    return xp.take(zero_padded(x, x.shape[0] + 1, x.shape[1]), rows, axis=0)
