# mypy: ignore-errors
"""Tokens to the ranks that have their experts: pairs are sorted by expert, and their numbers and
rows go where the experts are. A row travels once to each rank, for the first of the experts that it
has there.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from cutlass import Int32, Int64, Uint32, cute, select_
from cutlass import min as least

from ..common import ptx
from ..common.scan import inclusive_scan
from ..ranks.rows import BATCH, copy_rows, rows_of_lanes
from ..ranks.signals import add_release, add_shared, fetch_add, wait_for
from .peers import Peers

__all__ = ["Dispatch"]

_WORD = 4


@dataclass(frozen=True)
class Dispatch:
    """Sorts and sends this rank's tokens.

    Attributes:
        ids: (tokens, topk), the numbers of experts among those of all ranks.
        shared: the address of ``Sizes.sort_words``.
        thread, threads: of those that sort.
        barrier: the number of a barrier that is theirs.
    """

    peers: Peers
    ids: Any
    id_bytes: int
    shared: Any
    thread: Any
    threads: int
    barrier: int

    @property
    def bins(self) -> int:
        """Two of each expert: pairs for which a row travels, and others."""
        return 2 * self.peers.sizes.every

    def sync(self) -> None:
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=self.threads)

    def place(self, bin):
        """The address of a bin's count, then of where its next pair goes."""
        return self.shared + bin * _WORD

    def begin_of(self, bin):
        """Where a bin begins among all of this rank's pairs."""
        return Int32(ptx.load_shared(self.shared + (self.bins + bin) * _WORD, 4)[0])

    # --- sort -------------------------------------------------------------------------------------

    @cute.jit
    def sort(self):
        """Send the numbers of pairs; all threads, of all CTAs."""
        peers, pairs = self.peers, self.ids.shape[0] * self.peers.sizes.topk
        each = (pairs + peers.ctas - 1) // peers.ctas
        first = peers.cta * each
        end = least(first + each, pairs)
        for bin in range(self.thread, self.bins, self.threads):
            ptx.store_shared(self.place(bin), [Uint32(0)], 4)
        self.sync()
        for pair in range(first + self.thread, end, self.threads):
            bin = self.bin_of(pair)
            if bin >= 0:
                add_shared(self.place(bin), 1)
        self.sync()
        for bin in range(self.thread, self.bins, self.threads):
            count = Int32(ptx.load_shared(self.place(bin), 4)[0])
            if count > 0:
                before = fetch_add(peers.signal("bins", bin), count)
                ptx.store_shared(self.place(bin), [Uint32(before)], 4)
        self.grid_sync()
        self.scan()
        for bin in range(self.thread, self.bins, self.threads):
            place = Int32(ptx.load_shared(self.place(bin), 4)[0]) + self.begin_of(bin)
            ptx.store_shared(self.place(bin), [Uint32(place)], 4)
        self.sync()
        for pair in range(first + self.thread, end, self.threads):
            bin = self.bin_of(pair)
            if bin >= 0:
                self.send_pair(pair, bin, add_shared(self.place(bin), 1))
        self.send_counts()
        self.sync()
        if self.thread < peers.sizes.ranks:
            add_release(peers.signal("sorted", peers.rank, self.thread), 1, "sys")

    def expert(self, pair):
        """The expert of a pair, -1 of none."""
        address = self.ids.iterator.toint() + Int64(pair) * self.id_bytes
        found = Int32(ptx.load_global(address, 4))
        known = (found >= 0) & (found < self.peers.sizes.every)
        if self.id_bytes == 8:
            known = known & (ptx.load_global(address + 4, 4) == Uint32(0))
        return Int32(select_(known, found, Int32(-1)))

    @cute.jit
    def bin_of(self, pair):
        """The bin of a pair, -1 of none. A row travels for the least of its token's experts on a
        rank, and the first place where the token names it."""
        sizes = self.peers.sizes
        expert, bin = self.expert(pair), Int32(-1)
        if expert >= 0:
            start, owner, earlier = pair // sizes.topk * sizes.topk, expert // sizes.experts, False
            for k in range(sizes.topk):
                other = self.expert(start + k)
                same = (other >= 0) & (other // sizes.experts == owner)
                before = (other < expert) | ((other == expert) & (start + k < pair))
                earlier = earlier | (same & before)
            bin = 2 * expert + Int32(earlier)
        return bin

    @cute.jit
    def grid_sync(self):
        """All threads that sort, of this rank."""
        self.sync()
        if self.thread == 0:
            add_release(self.peers.signal("grid"), 1, "gpu")
            wait_for(self.peers.signal("grid"), self.peers.ctas)
        self.sync()

    @cute.jit
    def scan(self):
        """Where bins begin, in shared memory: the work of a warp."""
        if self.thread < 32:
            before = Int32(0)
            for chunk in range(0, self.bins, 32):
                bin, count = chunk + self.thread, Int32(0)
                if bin < self.bins:
                    count = Int32(ptx.load_global(self.peers.signal("bins", bin), 4))
                end = inclusive_scan(count, operator.add) + before
                if bin < self.bins:
                    address = self.shared + (self.bins + bin + 1) * _WORD
                    ptx.store_shared(address, [Uint32(end)], 4)
                before = cute.arch.shuffle_sync(end, 31)
            if self.thread == 0:
                ptx.store_shared(self.shared + self.bins * _WORD, [Uint32(0)], 4)
        self.sync()

    def send_pair(self, pair, bin, place) -> None:
        """To the rank that has its expert, and to this one's own list."""
        peers, sizes = self.peers, self.peers.sizes
        owner = bin // (2 * sizes.experts)
        ptx.store_global(peers.address("sends") + Int64(place) * _WORD, [Uint32(pair)], 4)
        there = peers.rank * sizes.pairs + place - self.begin_of(owner * (2 * sizes.experts))
        address = peers.of_peer(owner, "pairs") + Int64(there) * _WORD
        ptx.store_global(address, [Uint32(pair)], 4)

    @cute.jit
    def send_counts(self):
        """To all ranks, what :meth:`Peers.count` reads; CTAs share the experts."""
        peers, sizes = self.peers, self.peers.sizes
        first = peers.cta * self.threads + self.thread
        for expert in range(first, sizes.every, peers.ctas * self.threads):
            owner, bounds = (
                expert // sizes.experts,
                [self.begin_of(2 * expert + i) for i in range(3)],
            )
            start = bounds[0] - self.begin_of(2 * sizes.experts * owner)
            words = start, bounds[1] - bounds[0], bounds[2] - bounds[0], Int32(0)
            there = peers.rank * sizes.experts + expert % sizes.experts
            address = peers.of_peer(owner, "counts") + Int64(there) * (4 * _WORD)
            ptx.store_global(address, [Uint32(word) for word in words], 16)

    # --- send -------------------------------------------------------------------------------------

    @cute.jit
    def send(self, warp, warps):
        """Send rows to other ranks; ``warp`` of all ``warps`` of all CTAs that do."""
        peers, sizes = self.peers, self.peers.sizes
        lane, batch, before = cute.arch.lane_idx(), warp, Int32(0)
        wait_for(peers.signal("sorted", peers.rank), peers.ctas)  # by all CTAs
        for expert in range(sizes.experts):
            for i in range(1, sizes.ranks):
                owner = (peers.rank + i) % sizes.ranks
                bin = 2 * (owner * sizes.experts + expert)
                first, end = self.begin_of(bin), self.begin_of(bin + 1)
                batches = (end - first + BATCH - 1) // BATCH
                while batch < before + batches:
                    start = first + (batch - before) * BATCH
                    rows = least(end - start, Int32(BATCH))
                    token = peers.word("sends", start + least(lane, rows - 1)) // sizes.topk
                    row = peers.rank * sizes.tokens + token
                    self.copy(row, owner)
                    cute.arch.sync_warp()
                    if lane == 0:
                        index = peers.rank * sizes.experts + expert
                        add_release(peers.signal("arrived", index, owner), rows, "sys")
                    batch = batch + warps
                before = before + batches

    def copy(self, row, owner) -> None:
        """The rows of the first lanes, and their scales, to the same place of another rank."""
        peers, sizes, rows = self.peers, self.peers.sizes, rows_of_lanes(row)
        there = peers.of(owner) - peers.base
        for region, width in (
            ("x", sizes.row_bytes(sizes.hidden)),
            ("x_scale", sizes.scale_words(sizes.hidden) * _WORD),
        ):
            copy_rows(peers.address(region), rows, width, lambda _, source: source + there)
