# mypy: ignore-errors
"""K blocks of MXFP4 whose scales share a factor: what 128 rows of B are multiplied in.

An element of E2M1 times 2^j is exact in E4M3 for j from -8 to 6. The scales of 128 x 128 elements,
which are 2^(e - 127), mostly span less than that: then 2^(r - 127), with r six below the largest
e, is a factor of all, and j is e - r. Where they span more, a K block is multiplied in more than
one pass, each of which has a factor, and zeros for what another one has. A list says which K block
comes next, with which largest e, whether all of its elements are normal numbers of E4M3, and
whether it is the last: a word of an entry. A part of a list has 32 K blocks, and room for as many
passes as they may have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from ..common.ptx import load_global
from .upcast_config import B_ROWS, PART, PASSES

__all__ = [
    "END",
    "HIGHEST",
    "LAST",
    "LEAST_NORMAL",
    "LOWEST",
    "NORMAL",
    "KBlocks",
    "exponent_of",
    "k_block_of",
    "of_pass",
]

LOWEST, HIGHEST = -8, 6  # j
LEAST_NORMAL = -5  # from which on all magnitudes but zero are normal numbers of E4M3
LAST = -0x80000000  # the sign of the last entry
NORMAL = 0x40000000  # of an entry all of whose j are at least that, and none is of NaN
END = 0x20000000  # of the last entry of a part of the list
_SHIFT, _EXPONENT = 8, 0xFF  # of the K block, and where the largest e is


def of_pass(k_block, highest):
    """An entry that is not the last one."""
    return k_block << _SHIFT | highest


def k_block_of(entry):
    return (entry & (END - 1)) >> _SHIFT


def exponent_of(entry):
    """r of a pass."""
    return (entry & _EXPONENT) - HIGHEST


@dataclass(frozen=True)
class KBlocks:
    """Lists of all 128 rows of B, those of each group apart: ``entries`` (lists, length) int32.

    Attributes:
        n: rows of B, of a group.
    """

    entries: Any
    n: Any

    def line(self, index):
        """The address of a list."""
        return self.entries.iterator.toint() + Int64(index) * self.entries.stride[0] * 4

    def index(self, tile):
        """The list of a tile."""
        index = tile.column // B_ROWS
        if tile.group is not None:
            index = index + tile.group * cute.ceil_div(self.n, B_ROWS)
        return index

    @cute.jit
    def follow(self, schedule, work: cutlass.Constexpr, state):
        """``work(tile, entry, state)``, which gives the next state, of each entry of the lists of a
        CTA's tiles; by a warp."""
        start, step = schedule.first()
        for index in range(start, schedule.count, step):
            state = self.follow_tile(schedule.tile(index), work, state)

    @cute.jit
    def follow_tile(self, tile, work: cutlass.Constexpr, state):
        """The same of a tile's list, of which a lane reads each 32nd entry."""
        line, lane = self.line(self.index(tile)), cute.arch.lane_idx()
        for first in range(0, tile.k_blocks, PART):
            part = line + Int64(first) * (PASSES * 4)
            read, entry = Int32(load_global(part + Int64(lane) * 4, 4)), Int32(END)
            position = cutlass.min(tile.k_blocks - first, Int32(PART))
            for i in range(position):
                entry = cute.arch.shuffle_sync(read, i)
                state = work(tile, entry, state)
            while entry & END == 0:  # other passes, of few weights
                entry = Int32(load_global(part + Int64(position) * 4, 4))
                state = work(tile, entry, state)
                position = position + 1
        return state
