# mypy: ignore-errors
"""Rows of experts: a stable counting sort of the pairs of tokens and experts.

A CTA has a chunk of pairs, of which each warp has as many that follow each other. Lanes of a warp
whose pairs are of the same expert find each other by ``match.any``; the first of them counts them.
One kernel adds up the counts of each chunk. The next adds up those of the chunks before its own,
and writes where its pairs go.
"""

from __future__ import annotations

import operator

import cutlass
from cutlass import Int32, Int64, Uint32, const_expr, cute, range_constexpr, select_

from ..common import ptx
from ..common.pdl import pdl_wait
from ..common.scan import inclusive_scan
from ..common.shared import allocate, clear
from ..common.tensor_specs import HostFunction, any_tensor
from .route_config import THREADS, WARPS, RouteConfig

__all__ = ["Route", "host_function"]

_UNROLL = 8  # counts of chunks that are loaded at once


class Route:
    """The kernels of a :class:`RouteConfig` and the host code that launches them."""

    def __init__(self, config: RouteConfig):
        self.config = config

    @cute.jit
    def __call__(self, experts, counts, pairs, slots, offsets, tokens, stream):
        """Launch. ``experts`` (tokens, top_k); ``counts`` int32 (chunks, bins) of scratch; the
        others are the results, as those of ``blockscale.route``."""
        launch = {
            "grid": (counts.shape[0], 1, 1),
            "block": (THREADS, 1, 1),
            "stream": stream,
            "use_pdl": True,
        }
        self.count(experts, counts).launch(**launch)
        self.place(experts, counts, pairs, slots, offsets, tokens).launch(**launch)

    @cute.kernel
    def count(self, experts, counts):
        """Count the pairs of each chunk and bin."""
        pdl_wait()
        thread, chunk = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        bins = const_expr(self.config.bins)
        histograms, _, _, _ = self.count_warps(experts, cutlass.memory.SmemAllocator())
        if thread < bins:
            total = Int32(0)
            for warp in range_constexpr(WARPS):
                total += self.load(histograms, warp, thread)
            ptx.store_global(self.count_address(counts, chunk, thread), [Uint32(total)], 4)

    @cute.kernel
    def place(self, experts, counts, pairs, slots, offsets, tokens):
        """Where pairs go: histograms become the first row of each warp's pairs of a bin."""
        pdl_wait()
        thread, chunk = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        bins, chunks = const_expr(self.config.bins), counts.shape[0]
        memory = cutlass.memory.SmemAllocator()
        histograms, mine, of_pairs, ranks = self.count_warps(experts, memory)
        ends = allocate(memory, 4 * WARPS)
        before, total = Int32(0), Int32(0)  # of the thread's bin: in chunks before, in all
        if thread < bins:
            for first in range(0, chunks, _UNROLL):
                for i in range_constexpr(_UNROLL):
                    other = first + i
                    known = cutlass.min(other, chunks - 1)
                    found = Int32(ptx.load_global(self.count_address(counts, known, thread), 4))
                    found = Int32(select_(other < chunks, found, Int32(0)))
                    total += found
                    before += Int32(select_(other < chunk, found, Int32(0)))
        end = self.ends_of(total, ends)
        if thread < bins:
            row = end - total + before
            for warp in range_constexpr(WARPS):
                own = self.load(histograms, warp, thread)
                self.store(histograms, warp, thread, row)
                row += own
            if chunk == 0 and thread < bins - 1:
                address = offsets.iterator.toint() + Int64(thread) * 4
                ptx.store_global(address, [Uint32(end)], 4)
        cute.arch.sync_threads()
        for i in range_constexpr(self.config.rounds):
            pair = mine[i]
            if pair < pairs.shape[0]:
                row = self.load(histograms, thread // 32, of_pairs[i]) + ranks[i]
                self.store_long(pairs, row, pair)
                self.store_long(slots, pair, row)
                address = tokens.iterator.toint() + Int64(row) * 4
                ptx.store_global(address, [Uint32(pair // experts.shape[1])], 4)

    @cute.jit
    def count_warps(self, experts, memory):
        """Counts of each warp and bin, in shared memory; the thread's pairs, the bin of each, and
        how many of the warp's before it are alike."""
        thread, chunk = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        bins, rounds = const_expr(self.config.bins), const_expr(self.config.rounds)
        histograms = allocate(memory, WARPS * bins * 4)
        clear(histograms, WARPS * bins * 4, THREADS)
        lane, warp = cute.arch.lane_idx(), thread // 32
        earlier = (Uint32(1) << Uint32(lane)) - Uint32(1)
        first = (chunk * WARPS + warp) * (32 * rounds) + lane
        cute.arch.sync_threads()
        pairs, of_pairs, ranks = [], [], []
        for i in range_constexpr(rounds):
            pair, bin, before = first + 32 * i, Int32(-1), Int32(0)  # of a thread without a pair
            if pair < experts.shape[0] * experts.shape[1]:
                bin = self.bin_of(experts, pair)
                if const_expr(i > 0):
                    before = self.load(histograms, warp, bin)
            cute.arch.sync_warp()  # what was counted is read
            alike = cute.arch.match_sync(0xFFFFFFFF, bin)
            rank = Int32(cute.arch.popc(alike & earlier))
            if rank == 0 and bin >= 0:
                count = before + Int32(cute.arch.popc(alike))
                self.store(histograms, warp, bin, count)
            cute.arch.sync_warp()  # and written
            pairs.append(pair)
            of_pairs.append(bin)
            ranks.append(before + rank)
        cute.arch.sync_threads()
        return histograms, pairs, of_pairs, ranks

    def bin_of(self, experts, pair):
        """The expert of a pair; the number of experts where it is none of them."""
        size, count = self.config.index_bytes, self.config.num_experts
        address = experts.iterator.toint() + Int64(pair) * size
        expert = Int32(ptx.load_global(address, 4))
        known = (expert >= 0) & (expert < count)
        if size == 8:
            known = known & (ptx.load_global(address + 4, 4) == Uint32(0))
        return Int32(select_(known, expert, Int32(count)))

    @cute.jit
    def ends_of(self, total, shared):
        """Sums of ``total`` of all threads up to this one; ``shared`` has a word for each warp."""
        lane, warp = cute.arch.lane_idx(), cute.arch.thread_idx()[0] // 32
        end = inclusive_scan(total, operator.add)
        if lane == 31:
            ptx.store_shared(shared + warp * 4, [Uint32(end)], 4)
        cute.arch.sync_threads()
        of_warps = inclusive_scan(Int32(ptx.load_shared(shared + lane * 4, 4)[0]), operator.add)
        before = cute.arch.shuffle_sync(of_warps, cutlass.max(warp - 1, 0))
        return end + Int32(select_(warp > 0, before, Int32(0)))

    def load(self, histograms, warp, bin):
        return Int32(ptx.load_shared(histograms + (warp * self.config.bins + bin) * 4, 4)[0])

    def store(self, histograms, warp, bin, value) -> None:
        address = histograms + (warp * self.config.bins + bin) * 4
        ptx.store_shared(address, [Uint32(value)], 4)

    def count_address(self, counts, chunk, bin):
        return counts.iterator.toint() + (Int64(chunk) * self.config.bins + bin) * 4

    def store_long(self, out, index, value) -> None:
        """Of 8 bytes; ``value`` is not negative."""
        address = out.iterator.toint() + Int64(index) * 8
        ptx.store_global(address, [Uint32(value), Uint32(0)], 8)


def host_function(config: RouteConfig):
    """The host function of the kernels, which takes tensors of any shape."""
    index = Int32 if config.index_bytes == 4 else Int64
    return HostFunction(
        config.arch,
        Route(config),
        any_tensor(index, 2, config.index_bytes),
        any_tensor(Int32, 2, 4),
        any_tensor(Int64, 1, 8),
        any_tensor(Int64, 2, 8),
        any_tensor(Int32, 1, 4),
        any_tensor(Int32, 1, 4),
    )
