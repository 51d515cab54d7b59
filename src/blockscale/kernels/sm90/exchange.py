# mypy: ignore-errors
"""Sums of a tile from two blocks of threads, each of which had half of K, brought together.

The second block writes its sums into the first one's shared memory, a thread to the same thread.
"""

from __future__ import annotations

import cutlass
from cutlass import cute, range_constexpr

from . import ptx
from .config import Config

__all__ = ["Exchange"]


class Exchange:
    def __init__(self, config: Config):
        self.config = config

    def allocate(self, memory) -> None:
        """Room for a tile, and for each warpgroup a barrier: it is full, or free."""
        config = self.config
        self.sums = memory.allocate_array(
            cutlass.Uint8, config.exchange_bytes, byte_alignment=128
        ).toint()
        self.full = memory.allocate_array(cutlass.Int64, 2 * config.warpgroups)
        self.free = self.full + config.warpgroups

    def initialize(self) -> None:
        for i in range(2 * self.config.warpgroups):
            cute.arch.mbarrier_init(self.full + i, 128)

    def places(self, group, thread):
        """Of a thread's sums, four at a time."""
        return (
            self.sums + group * (self.config.exchange_bytes // self.config.warpgroups) + thread * 16
        )

    @cute.jit
    def send(self, sums, group, thread, phase, peer):
        """Wait until the last sums have been read, then write these."""
        ptx.wait_cluster((self.free + group).toint(), phase ^ 1)
        place = ptx.at_block(self.places(group, thread), peer)
        each = self.config.batch // 2
        for i in range_constexpr(0, each * len(sums), 4):
            values = [sums[i // each][i % each + j] for j in range(4)]
            ptx.store_remote(place, i * 512, values)
        ptx.arrive_remote(ptx.at_block((self.full + group).toint(), peer))

    @cute.jit
    def receive(self, sums, group, thread, phase, peer):
        """Add the sums of the other block."""
        ptx.wait_cluster((self.full + group).toint(), phase)
        place = self.places(group, thread)
        each = self.config.batch // 2
        for i in range_constexpr(0, each * len(sums), 4):
            values = ptx.load_floats(place, i * 512, 4)
            for j in range_constexpr(4):
                sums[i // each][i % each + j] = sums[i // each][i % each + j] + values[j]
        ptx.arrive_remote(ptx.at_block((self.free + group).toint(), peer))
