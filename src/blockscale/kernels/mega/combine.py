# mypy: ignore-errors
"""The end of a launch: results have come back from all ranks, and are added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from cutlass import Float32, Int64, Uint32, cute, range_constexpr, select_

from ...dtypes import BFLOAT16
from ..common import ptx
from ..common.arithmetic import add, multiply, narrow, widen
from ..ranks.signals import add_release, load_acquire, wait_for_peer
from .dispatch import Dispatch
from .peers import Peers

__all__ = ["Finish"]

_VECTOR = 8  # columns of a thread: 16 bytes of bf16


@dataclass(frozen=True)
class Finish:
    """Of some warps of each CTA, when they have sent all their results.

    Attributes:
        dispatch: reads what experts tokens have.
        weights, out: (tokens, topk) fp32, and (tokens, H).
        warp, warps: this one, of those of all CTAs.
    """

    peers: Peers
    dispatch: Dispatch
    weights: Any
    out: Any
    out_dtype: np.dtype
    warp: Any
    warps: Any
    blackwell: bool

    @cute.jit
    def __call__(self):
        peers, sizes, lane = self.peers, self.peers.sizes, cute.arch.lane_idx()
        if self.warp == 0:
            self.clear()
        cute.arch.sync_warp()
        if load_acquire(peers.status, "gpu") == 0:  # else what it sent is not to be believed
            for rank in range(lane, sizes.ranks, 32):
                add_release(peers.signal("finished", peers.rank, rank), 1, "sys")
        for rank in range(lane, sizes.ranks, 32):
            address = peers.signal("finished", rank)
            wait_for_peer(address, self.warps, rank, peers.status, peers.limit)
        cute.arch.sync_warp()
        complete = load_acquire(peers.status, "gpu") == 0
        parts = (sizes.hidden + 32 * _VECTOR - 1) // (32 * _VECTOR)
        for item in range(self.warp, self.out.shape[0] * parts, self.warps):
            column = (item % parts * 32 + lane) * _VECTOR
            if column < sizes.hidden:
                self.combine(item // parts, column, complete)
        if self.warp == 0 and lane == 0:
            ptx.store_global(peers.address("state"), [Uint32(1 - peers.set)], 4)

    @cute.jit
    def clear(self):
        """The counters of the next launch, which no rank begins before this one has arrived."""
        peers, words = self.peers, self.peers.buffers.set_words
        start = peers.address("signals") + Int64((1 - peers.set) * words) * 4
        for word in range(cute.arch.lane_idx(), words, 32):
            ptx.store_global(start + Int64(word) * 4, [Uint32(0)], 4)

    @cute.jit
    def combine(self, token, column, complete):
        """A token's results, weighted and added up in the order of its experts: zeros of no expert,
        NaN where a rank is missing."""
        sizes = self.peers.sizes
        total = (Float32(0.0),) * _VECTOR
        for k in range(sizes.topk):
            pair = Int64(token) * sizes.topk + k
            known = self.dispatch.expert(pair) >= 0
            start = self.peers.address("results") + (pair * sizes.hidden + column) * 2
            words = [Uint32(select_(known, word, Uint32(0))) for word in ptx.load_words(start)]
            weight = ptx.load_global_float(self.weights.iterator.toint() + pair * 4)
            values = multiply(widen(words, BFLOAT16), [weight] * _VECTOR, self.blackwell)
            total = tuple(add(list(total), values, self.blackwell))
        total = [Float32(select_(complete, each, Float32(float("nan")))) for each in total]
        words = narrow(total, self.out_dtype)
        start = Int64(token) * sizes.hidden + column
        address = self.out.iterator.toint() + start * self.out_dtype.itemsize
        for i in range_constexpr(0, len(words), 4):
            some = words[i : i + 4]
            ptx.store_global(address + 4 * i, some, 4 * len(some))
