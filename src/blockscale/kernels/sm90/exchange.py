# mypy: ignore-errors
"""Sums of a tile from two warpgroups, each of which had every other K block, brought together.

The second one writes its sums to shared memory, from which the first one adds them: a thread those
of the same thread.
"""

from __future__ import annotations

import cutlass
from cutlass import cute, range_constexpr

from . import ptx
from .product_config import ProductConfig

__all__ = ["Exchange"]


class Exchange:
    def __init__(self, config: ProductConfig):
        self.config = config

    def allocate(self, memory) -> None:
        """Room for a tile, and two barriers: it is full, or free."""
        nbytes = self.config.exchange_bytes
        self.sums = memory.allocate_array(cutlass.Uint8, nbytes, byte_alignment=128).toint()
        self.full = memory.allocate_array(cutlass.Int64, 2)
        self.free = self.full + 1

    def initialize(self) -> None:
        for barrier in (self.full, self.free):
            cute.arch.mbarrier_init(barrier, 128)

    def quads(self, sums):
        """Four at a time: their batch, the first of them, and how far apart they are kept."""
        each = self.config.batch // 2
        return [(sums[i // each], i % each, i * 512) for i in range(0, each * len(sums), 4)]

    @cute.jit
    def send(self, sums, thread, phase):
        """Wait until the last sums have been read, then write these."""
        cute.arch.mbarrier_wait(self.free, phase ^ 1)
        place = self.sums + thread * 16
        for batch, first, offset in self.quads(sums):
            ptx.store_floats(place, offset, [batch[first + j] for j in range(4)])
        cute.arch.mbarrier_arrive(self.full)

    @cute.jit
    def receive(self, sums, thread, phase):
        """Add the sums of the other warpgroup."""
        cute.arch.mbarrier_wait(self.full, phase)
        place = self.sums + thread * 16
        for batch, first, offset in self.quads(sums):
            values = ptx.load_floats(place, offset, 4)
            for j in range_constexpr(4):
                batch[first + j] = batch[first + j] + values[j]
        cute.arch.mbarrier_arrive(self.free)
