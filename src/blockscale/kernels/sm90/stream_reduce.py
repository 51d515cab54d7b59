# mypy: ignore-errors
"""Accumulators of a tile from CTAs that each had a part of its K blocks, added up.

They lie in global memory: each CTA sends those of one tile at most, a thread to the same thread,
and counts up when they are there. The counters have been set to zero by the kernel before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int64, cute, range_constexpr

from . import ptx
from .mixed_config import COUNTERS, WARPGROUPS, Config

__all__ = ["StreamReduce"]


@dataclass(frozen=True)
class StreamReduce:
    """``partials``: words, of which ``COUNTERS`` are the first, then accumulators."""

    config: Config
    partials: Any

    def counter(self, cta, share):
        return self.partials.iterator.toint() + Int64(cta * WARPGROUPS + share) * 4

    def place(self, cta, share, thread):
        """Of a thread's, four at a time."""
        index = Int64(cta * WARPGROUPS + share)
        start = COUNTERS * 4 + index * self.config.share_bytes + thread * 16
        return self.partials.iterator.toint() + start

    @cute.jit
    def send(self, share, acc, thread, cta):
        """Write those of ``cta``, which calls."""
        place = self.place(cta, share, thread)
        for i in range_constexpr(0, self.config.rows // 2, 4):
            ptx.st_global(place, i * 512, [acc[i + j] for j in range(4)])
        cute.arch.barrier(barrier_id=share + 1, number_of_threads=128)
        if thread == 0:
            ptx.count_up(self.counter(cta, share))

    @cute.jit
    def receive(self, share, acc, thread, first, last):
        """Add those of CTAs from ``first`` to ``last``, always in this order."""
        for cta in range(first, last + 1):
            ptx.wait_counted(self.counter(cta, share))
            place = self.place(cta, share, thread)
            for i in range_constexpr(0, self.config.rows // 2, 4):
                partial_acc = ptx.ld_global(place, i * 512, 4)
                for j in range_constexpr(4):
                    acc[i + j] = acc[i + j] + partial_acc[j]
