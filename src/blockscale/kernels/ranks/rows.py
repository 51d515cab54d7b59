# mypy: ignore-errors
"""Where ranks' memory is, and copies of a few rows by a warp, several in flight at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute, range_constexpr

from ..common import ptx

__all__ = ["BATCH", "copy_rows", "memory_of", "of_lane", "rows_of_lanes"]

BATCH = 2  # rows that a warp copies, and whose pieces are in flight: few, as there may be few


def memory_of(table, rank):
    """The address of a rank's memory, of a table that has 8 bytes for each."""
    at = table + Int64(rank) * 8
    low, high = (ptx.load_global(at + half, 4) for half in (0, 4))
    return Int64(high) << 32 | Int64(low)


def of_lane(address, lane):
    """The address that a lane has, for all of a warp."""
    halves = (Int32(address & Int64(0xFFFFFFFF)), Int32(address >> 32))
    low, high = (cute.arch.shuffle_sync(half, lane) for half in halves)
    return Int64(high) << 32 | Int64(Uint32(low))


def rows_of_lanes(row) -> list:
    """The numbers that the first lanes have, for all of a warp."""
    return [cute.arch.shuffle_sync(row, i) for i in range(BATCH)]


@cute.jit
def copy_rows(base, rows, width, target: Callable[[int, Any], Any], apart: int = 0):
    """Copy rows of ``width`` bytes, those of these numbers after ``base``: the ``i``-th one to
    ``target(i, its address)``. A multiple of 4, by 16 bytes where it is one of 16; or a word at a
    time, each so many bytes ``apart`` from the one before in the target. (Addresses are made anew
    for each piece: there are few registers.)"""
    size = 16 if width % 16 == 0 and not apart else 4
    first, unroll = cute.arch.lane_idx() * size, 2  # as registers have room
    for at in cutlass.range(first, width, 32 * size, unroll=unroll):
        to = at // size * apart if apart else at
        held = [_load(base + Int64(row) * width + at, size) for row in rows]
        for i in range_constexpr(len(rows)):
            start = base + Int64(rows[i]) * width
            ptx.store_global(target(i, start) + to, held[i], size)


def _load(address, size: int) -> list:
    return ptx.load_words(address) if size == 16 else [ptx.load_global(address, 4)]
