# mypy: ignore-errors
"""Copies of a few rows by a warp, several in flight at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutlass import Int32, Int64, Uint32, cute, range_constexpr

from ..common import ptx

__all__ = ["BATCH", "copy_rows", "of_lane", "rows_of_lanes"]

BATCH = 8  # rows that a warp copies
_AT_ONCE = 4  # of them, whose pieces are in flight


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
    for at in range(cute.arch.lane_idx() * size, width, 32 * size):
        to = at // size * apart if apart else at
        for first in range_constexpr(0, BATCH, _AT_ONCE):
            some = rows[first : first + _AT_ONCE]
            held = [_load(base + Int64(row) * width + at, size) for row in some]
            for i in range_constexpr(_AT_ONCE):
                start = base + Int64(some[i]) * width
                ptx.store_global(target(first + i, start) + to, held[i], size)


def _load(address, size: int) -> list:
    return ptx.load_words(address) if size == 16 else [ptx.load_global(address, 4)]
