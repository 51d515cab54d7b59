# mypy: ignore-errors
"""Shards of a matrix that come together while it is multiplied: each rank writes its own to all
others, a chunk of rows after the other, and counters tell which have come.

A launch is over on a rank when it has all chunks. The next one begins by saying so to the others:
only then do they write what it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, Int64, Uint32, cute

from ..common import ptx
from .gather_sizes import ARRIVED, CHUNK_ROWS, EPOCH, FINISHED, MISSING, MOST_CHUNKS, READY
from .rows import memory_of
from .signals import add_release, arrive, fence_async, load_acquire, wait_for_peer

__all__ = ["Gathering", "Sender"]

_WORD = 4
_LANES = 32 * 16  # bytes that a warp loads at once
_STEPS = [i * _LANES for i in range(4)]  # of these in flight: as registers have room
_SCALES = CHUNK_ROWS * 4  # bytes of a K block's scales in a chunk


@dataclass(frozen=True)
class Gathering:
    """What the roles of a CTA know of a launch.

    Attributes:
        start: the address of this rank's memory; ``table``: that of the addresses of all, 8 bytes
            each.
        signals, data, scale: addresses in it: words, rows of all ranks, and their scales after a
            row of NaN.
        rank, ranks: this one, and how many there are.
        rows, k_blocks: of a shard.
        limit: nanoseconds to wait for another rank.
    """

    start: Any
    table: Any
    signals: Any
    data: Any
    scale: Any
    rank: Any
    ranks: Any
    rows: Any
    k_blocks: Any
    limit: Any

    @classmethod
    def of_launch(cls, memory, own, whole, scale, rank, limit) -> Gathering:
        """``memory``: the start of this rank's memory, the addresses of all, and signals; ``own``
        (rows, K) is the shard, ``whole`` (ranks * rows, K) and ``scale`` are in memory."""
        start, table, signals = (each.iterator.toint() for each in memory)
        rows, k_blocks = own.shape[0], own.shape[1] // 128
        ranks = whole.shape[0] // rows
        places = start, table, signals, whole.iterator.toint(), scale.iterator.toint()
        return cls(*places, rank, ranks, rows, k_blocks, limit)

    def epoch(self):
        """Launches up to this one. Only who will :meth:`finish` it asks: then it is another."""
        return Int32(ptx.load_global(self.word(EPOCH), 4)) + 1

    def word(self, index, rank=None):
        """The address of a word of signals, of this rank or of another one."""
        there = Int64(0) if rank is None else self.apart(rank)
        return self.signals + there + Int64(index) * _WORD

    def apart(self, rank):
        """Return how many bytes the memory of another rank begins after this one's."""
        return memory_of(self.table, rank) - self.start

    def chunk(self, epoch, source, chunk):
        """The number of a chunk's counter."""
        first = ARRIVED + epoch % 2 * MOST_CHUNKS
        return first + source * (self.rows // CHUNK_ROWS) + chunk

    @cute.jit
    def await_rows(self, epoch, source, row, rows):
        """Until ``rows`` of another rank's shard from ``row`` on are here, for TMA, too; whether a
        rank is missing, and they may not be. All lanes of a warp. A sender says first which rank
        did not begin: so this waits twice as long."""
        for i in range(rows // CHUNK_ROWS):
            index = self.chunk(epoch, source, row // CHUNK_ROWS + i)
            given = self.word(index), self.k_blocks, source, self.word(MISSING), 2 * self.limit
            wait_for_peer(*given)
        cute.arch.sync_warp()
        fence_async()
        return load_acquire(self.word(MISSING), "gpu") != 0

    @cute.jit
    def finish(self, epoch, warps):
        """Said by each of ``warps`` warps of all CTAs, which have read the epoch: the last one
        ends it."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            before = arrive(self.word(FINISHED))
            if before == warps - 1:
                ptx.store_global(self.word(FINISHED), [Uint32(0)], 4)
                ptx.store_global(self.word(EPOCH), [Uint32(epoch)], 4)


@dataclass(frozen=True)
class Sender:
    """Writes this rank's shard to all others: the work of some warps of each CTA.

    Attributes:
        own: the address of the shard's rows, which lie together; ``own_scale``: of its scales
            (K / 128, rows).
        warp, warps: this one, of those of all CTAs.
    """

    gathering: Gathering
    own: Any
    own_scale: Any
    warp: Any
    warps: Any

    @cute.jit
    def __call__(self, epoch):
        g, lane = self.gathering, cute.arch.lane_idx()
        if self.warp == 0:
            for peer in range(lane, g.ranks, 32):
                if peer != g.rank:
                    add_release(g.word(READY + g.rank, peer), 1, "sys")
        for i in range(self.warp * 32 + lane, MOST_CHUNKS, self.warps * 32):  # of the next launch
            ptx.store_global(g.word(g.chunk(epoch + 1, 0, i)), [Uint32(0)], 4)
        for peer in range(lane, g.ranks, 32):
            if peer != g.rank:
                given = g.word(READY + peer), epoch, peer, g.word(MISSING), g.limit
                wait_for_peer(*given)
        cute.arch.sync_warp()
        if load_acquire(g.word(MISSING), "gpu") == 0:
            others = g.ranks - 1
            for unit in range(self.warp, g.rows // CHUNK_ROWS * others * g.k_blocks, self.warps):
                block, rest = unit % g.k_blocks, unit // g.k_blocks
                peer, chunk = (g.rank + 1 + rest % others) % g.ranks, rest // others
                self.send(chunk, block, g.apart(peer))
                cute.arch.sync_warp()
                if lane == 0:
                    add_release(g.word(g.chunk(epoch, g.rank, chunk), peer), 1, "sys")

    @cute.jit
    def send(self, chunk, block, there):
        """A K block's share of a chunk's bytes, as they lie, and its scales."""
        g, nbytes = self.gathering, CHUNK_ROWS * 128
        at = Int64(chunk * g.k_blocks + block) * nbytes + cute.arch.lane_idx() * 16
        source = self.own + at
        target = g.data + there + Int64(g.rank * g.rows) * (g.k_blocks * 128) + at
        for first in range(0, nbytes, len(_STEPS) * _LANES):
            held = [ptx.load_words(source + first + step) for step in _STEPS]
            for step, words in zip(_STEPS, held, strict=True):
                ptx.store_global(target + first + step, words, 16)
        if cute.arch.lane_idx() < _SCALES // 16:
            within = cute.arch.lane_idx() * 16
            row = Int64(block) * g.rows + chunk * CHUNK_ROWS
            there_row = Int64(block + 1) * (g.ranks * g.rows) + g.rank * g.rows + chunk * CHUNK_ROWS
            words = ptx.load_words(self.own_scale + row * 4 + within)
            ptx.store_global(g.scale + there + there_row * 4 + within, words, 16)
