# mypy: ignore-errors
"""Copies of a few rows by a warp, all of them in flight at once."""

from __future__ import annotations

from cutlass import Int32, Int64, Uint32, cute, range_constexpr

from ..common import ptx

__all__ = ["BATCH", "copy_rows", "of_lane"]

BATCH = 8  # rows that a warp copies at once


def of_lane(address, lane: int):
    """The address that a lane has, for all of a warp."""
    halves = (Int32(address & Int64(0xFFFFFFFF)), Int32(address >> 32))
    low, high = (cute.arch.shuffle_sync(half, lane) for half in halves)
    return Int64(high) << 32 | Int64(Uint32(low))


@cute.jit
def copy_rows(source, target, width):
    """Copy ``width`` bytes from ``source`` to ``target``, of each of the first lanes of a warp: a
    multiple of 4, by 16 bytes where it is one of 16."""
    sources = [of_lane(source, i) for i in range(BATCH)]
    targets = [of_lane(target, i) for i in range(BATCH)]
    size = 16 if width % 16 == 0 else 4
    for at in range(cute.arch.lane_idx() * size, width, 32 * size):
        held = [_load(source + at, size) for source in sources]
        for i in range_constexpr(BATCH):
            ptx.store_global(targets[i] + at, held[i], size)


def _load(address, size: int) -> list:
    return ptx.load_words(address) if size == 16 else [ptx.load_global(address, 4)]
