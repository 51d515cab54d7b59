# mypy: ignore-errors
"""The order of work: expert after expert, units of rows of each, bands of a few units at a time; of
a band the tiles of the first product, column after column, and those of the second one when the
first is half a ring ahead. So what both keep between them fits in rings, and every tile waits for
earlier ones alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, const_expr, cute, select_
from cutlass import min as least

from ..common.tile_ring import NONE, TileRing
from ..ranks.signals import fetch_add
from .peers import GO, Peers

__all__ = ["Finder", "Walk", "bands"]


def bands(ring: int) -> tuple[int, int]:
    """Of a ring of so many units: the most that a band has, and how many units the first product is
    ahead of the second one. When a band begins, the second product of what had its slots before is
    in the order already: two bands and the lag are not more than the ring."""
    return ring // 4, ring // 2


@dataclass(frozen=True)
class Walk:
    """Experts that have rows, in their order; by a warp.

    A place is the expert, how many of its rows are left, the number of the unit that begins there,
    counted through all experts, the number of that row, and the totals of 32 experts, one a lane.
    """

    peers: Peers
    unit_rows: int

    @property
    def ring(self) -> int:
        """Units that a ring holds."""
        return self.peers.sizes.ring_rows // self.unit_rows

    def begin(self) -> tuple:
        return self.settle(Int32(-1), Int32(0), Int32(0), Int32(0), Int32(0))

    def more(self, place):
        return place[1] > 0

    def units(self, place):
        """How many units the rows that are left make."""
        return (place[1] + self.unit_rows - 1) // self.unit_rows

    def advance(self, place, units) -> tuple:
        """The place after so many units."""
        expert, left, unit, row, totals = place
        rows = least(left, units * self.unit_rows)
        return self.settle(expert, left - rows, unit + units, row + rows, totals)

    @cute.jit
    def settle(self, expert, left, unit, row, totals):
        """The next expert that has rows, where none is left of this one."""
        experts = self.peers.sizes.experts
        while (left == 0) & (expert + 1 < experts):
            expert = expert + 1
            if expert % 32 == 0:
                totals = self.peers.word("totals", expert + cute.arch.lane_idx())
            left = cute.arch.shuffle_sync(totals, expert % 32)
        return expert, left, unit, row, totals


@dataclass(frozen=True)
class Finder:
    """Fills the ring of tiles of a CTA: the work of a warp.

    A tile is four integers: its unit, and whether it is of the second product; its column and
    expert; the number of the unit's first row; how many rows the unit has, and its K blocks.

    Attributes:
        across: tiles of a unit in each of the two products.
        k_blocks: of each. (With a selection of constants as the end of a loop CuTe DSL 4.8
            crashes, so those who read the ring do not select.)
        cluster, clusters: this one, and how many there are.
        dynamic: the next tile is the first that no CTA has taken, so that those which are behind
            take fewer; else every so many-th one, as CTAs of a cluster must take the same.
    """

    walk: Walk
    ring: TileRing
    across: tuple[int, int]
    k_blocks: tuple[int, int]
    cluster: Any
    clusters: Any
    dynamic: bool

    @cute.jit
    def __call__(self):
        slot, phase = Int32(0), Int32(0)
        peers, walk = self.walk.peers, self.walk
        if peers.await_go() == GO:
            band, lag = bands(walk.ring)
            first, index, base = walk.begin(), self.cluster, Int32(0)
            second = first
            while walk.more(first) | walk.more(second):
                units = [least(walk.units(each), Int32(band)) for each in (first, second)]
                ahead = first[2] - second[2] - units[1]
                which = walk.more(second) & ((ahead >= lag) | (first[1] == 0))
                place = tuple(select_(which, b, a) for a, b in zip(first, second, strict=True))
                count = select_(which, units[1], units[0])
                tiles = count * select_(which, Int32(self.across[1]), Int32(self.across[0]))
                while index < base + tiles:
                    within = index - base
                    words = self.words(place, which, within % count, within // count)
                    self.ring.put(slot, phase, words)
                    slot, phase = self.ring.advance(slot, phase)
                    index = self.next_tile(index, slot, phase)
                base = base + tiles
                after = walk.advance(place, count)
                first = tuple(select_(which, a, b) for a, b in zip(first, after, strict=True))
                second = tuple(select_(which, b, a) for a, b in zip(second, after, strict=True))
        self.ring.put(slot, phase, [Int32(NONE)] * 4)

    @cute.jit
    def next_tile(self, index, slot, phase):
        """The number of the tile after this one, which goes to a slot; the first one is the
        cluster's own. None is taken before it is needed."""
        if const_expr(self.dynamic):
            self.ring.await_room(slot, phase)
            if cute.arch.lane_idx() == 0:
                index = self.clusters + fetch_add(self.walk.peers.signal("tiles"), 1)
            index = cute.arch.shuffle_sync(index, 0)
        else:
            index = index + self.clusters
        return index

    def words(self, place, which, unit, column) -> list:
        expert, left, first, row, _ = place
        before = unit * self.walk.unit_rows
        rows = least(left - before, Int32(self.walk.unit_rows))
        k_blocks = select_(which, Int32(self.k_blocks[1]), Int32(self.k_blocks[0]))
        unit = first + unit | Int32(which) << 30
        return [unit, column << 16 | expert, row + before, k_blocks << 16 | rows]
