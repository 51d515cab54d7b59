# mypy: ignore-errors
"""Rows of experts, from what ranks have sent to the ring that the first product reads: the work of
a few warps of each CTA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cutlass import Int32, Int64, Uint32, cute, select_
from cutlass import max as most

from ..common import ptx
from ..ranks.rows import BATCH, copy_rows, rows_of_lanes
from ..ranks.signals import add_release, load_acquire, wait_for, wait_for_peer
from .buffers import TILE_ROWS
from .order import Walk
from .peers import GO, MISSING, Peers

__all__ = ["Gather"]

_WORD = 4


@dataclass(frozen=True)
class Gather:
    """Fills the first ring.

    Attributes:
        tiles: of a unit that read a row of the ring, and say so.
        scale_place: the word, of a tile of scales with a word for each row, where a row's is.
        copy: brings rows to the ring, as ``rows.copy_rows`` does where they stay as they are.
        warp, warps: this one, of those of all CTAs.
    """

    walk: Walk
    tiles: int
    scale_place: Callable[[Any], Any]
    warp: Any
    warps: Any
    copy: Callable[..., None] = copy_rows

    @property
    def peers(self) -> Peers:
        return self.walk.peers

    @cute.jit
    def __call__(self):
        peers, walk = self.peers, self.walk
        if self.warp == 0:
            self.begin()
        if peers.await_go() == GO:
            batches, ring = walk.unit_rows // BATCH, walk.ring
            batch, awaited, place = self.warp, Int32(0), walk.begin()
            while walk.more(place):
                expert, rows, first, row, _ = place
                end = (first + walk.units(place)) * batches
                while batch < end:
                    awaited = self.await_rows(awaited, expert)
                    unit, within = batch // batches, batch % batches * BATCH
                    slot = unit % ring
                    wait_for(peers.signal("up_done", slot), unit // ring * self.tiles)
                    start = (unit - first) * walk.unit_rows + within
                    if start < rows:
                        self.fill(expert, start, rows, row, slot * walk.unit_rows + within)
                    cute.arch.sync_warp()
                    if cute.arch.lane_idx() == 0:
                        add_release(peers.signal("up_full", slot), BATCH, "gpu")
                    batch = batch + self.warps
                place = walk.advance(place, walk.units(place))

    @cute.jit
    def begin(self):
        """Wait for all ranks to have sorted their pairs, add up those of each expert, and let all
        CTAs of this rank begin; the work of one warp."""
        peers, sizes, lane = self.peers, self.peers.sizes, cute.arch.lane_idx()
        for source in range(lane, sizes.ranks, 32):
            address = peers.signal("sorted", source)
            wait_for_peer(address, peers.ctas, source, peers.status, peers.limit)
        cute.arch.sync_warp()
        going = load_acquire(peers.status, "gpu") == 0
        for expert in range(lane, (sizes.experts + 31) // 32 * 32, 32):
            total = Int32(0)
            if going & (expert < sizes.experts):
                for source in range(sizes.ranks):
                    total = total + peers.count(source, expert, 2)
            address = peers.address("totals") + Int64(expert) * _WORD
            ptx.store_global(address, [Uint32(total)], 4)
        cute.arch.sync_warp()
        if lane == 0:
            go = Int32(select_(going, Int32(GO), Int32(MISSING)))
            add_release(peers.signal("go"), go, "gpu")

    @cute.jit
    def await_rows(self, awaited, expert):
        """Wait for the rows of all experts before one, and of it, from other ranks; the next one to
        wait for."""
        peers, sizes, lane = self.peers, self.peers.sizes, cute.arch.lane_idx()
        while awaited <= expert:
            for source in range(lane, sizes.ranks, 32):
                if source != peers.rank:
                    rows = peers.count(source, awaited, 1)
                    address = peers.signal("arrived", source * sizes.experts + awaited)
                    wait_for_peer(address, rows, source, peers.status, peers.limit)
            awaited = awaited + 1
        cute.arch.sync_warp()
        return awaited

    @cute.jit
    def fill(self, expert, start, rows, row, to):
        """Copy rows of an expert from the ``start``-th on, of all its ``rows``, whose first one is
        ``row``, to row ``to`` of the ring and after. Those beyond the last one repeat it."""
        peers, sizes, lane = self.peers, self.peers.sizes, cute.arch.lane_idx()
        index = start + lane
        left, found = select_(index < rows, index, rows - 1), Int32(-1)
        for source in range(sizes.ranks):
            count = peers.count(source, expert, 2)
            found = select_((found < 0) & (left < count), Int32(source), found)
            left = select_(found < 0, left - count, left)
        source = most(found, Int32(0))
        at = source * sizes.pairs + peers.count(source, expert, 0) + left
        pair = peers.word("pairs", at)
        if (lane < BATCH) & (index < rows):
            address = peers.address("origins") + Int64(row + index) * _WORD
            ptx.store_global(address, [Uint32(source * sizes.pairs + pair)], 4)
        came = rows_of_lanes(source * sizes.tokens + pair // sizes.topk)
        width, words = sizes.ring_bytes(sizes.hidden), sizes.scale_words(sizes.hidden)
        line = peers.address("up_ring") + Int64(to) * width
        from_x = peers.address("x"), came, sizes.row_bytes(sizes.hidden)
        self.copy(*from_x, lambda i, _: line + i * width)
        tile = peers.address("up_ring_scale") + Int64(to // TILE_ROWS * words) * (TILE_ROWS * _WORD)
        first = to % TILE_ROWS
        copy_rows(
            peers.address("x_scale"),
            came,
            words * _WORD,
            lambda i, _: tile + self.scale_place(first + i) * _WORD,
            TILE_ROWS * _WORD,
        )
