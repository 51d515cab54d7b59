# mypy: ignore-errors
"""Sums of a tile from blocks of threads that each had a part of K, brought together.

Warpgroups with the same rows of the tile do so in one of a cluster's blocks, each group's in the
next block. The others write theirs into its shared memory, a thread to the same thread; it adds
them in an order that is always the same.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute, range_constexpr

from . import ptx
from .widened_config import Config

__all__ = ["Exchange"]


class Exchange:
    def __init__(self, config: Config):
        self.config = config

    def allocate(self, memory) -> None:
        """Room for others' sums, and for each warpgroup a barrier: all are there, or are free."""
        config = self.config
        nbytes = (config.split - 1) * config.shared_groups * config.exchange_bytes
        self.sums = memory.allocate_array(cutlass.Uint8, nbytes, byte_alignment=128).toint()
        self.full = memory.allocate_array(cutlass.Int64, 2 * config.warpgroups)
        self.free = self.full + config.warpgroups

    def initialize(self) -> None:
        config = self.config
        for i in range(config.warpgroups):
            cute.arch.mbarrier_init(self.full + i, 128 * (config.split - 1))
            cute.arch.mbarrier_init(self.free + i, 128)

    def place(self, group, thread, distance):
        """Of a thread's sums from the block so many after the one that adds, four at a time."""
        config = self.config
        index = (distance - 1) * config.shared_groups + group // config.split
        return self.sums + index * config.exchange_bytes + thread * 16

    @cute.jit
    def send(self, sums, group, thread, phase, part):
        """Wait until the last sums have been read, then write these."""
        owner = group % self.config.split
        ptx.wait_cluster((self.free + group).toint(), phase ^ 1)
        distance = (part - owner) & (self.config.split - 1)
        place = ptx.at_block(self.place(group, thread, distance), owner)
        each = self.config.batch // 2
        for i in range_constexpr(0, each * len(sums), 4):
            values = [sums[i // each][i % each + j] for j in range(4)]
            ptx.store_remote(place, i * 512, values)
        ptx.arrive_remote(ptx.at_block((self.full + group).toint(), owner))

    @cute.jit
    def receive(self, sums, group, thread, phase):
        """Add the sums of the other blocks."""
        split, each = self.config.split, self.config.batch // 2
        ptx.wait_cluster((self.full + group).toint(), phase)
        for distance in range_constexpr(1, split):
            place = self.place(group, thread, distance)
            for i in range_constexpr(0, each * len(sums), 4):
                values = ptx.load_floats(place, i * 512, 4)
                for j in range_constexpr(4):
                    sums[i // each][i % each + j] = sums[i // each][i % each + j] + values[j]
        for distance in range_constexpr(1, split):
            sender = (group + distance) & (split - 1)
            ptx.arrive_remote(ptx.at_block((self.free + group).toint(), Int32(sender)))
