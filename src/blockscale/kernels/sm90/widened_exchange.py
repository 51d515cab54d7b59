# mypy: ignore-errors
"""Sums of a tile from blocks of threads that each had a part of K, brought together.

A share is 64 of the tile's rows of B, those of one wgmma. Its sums are added up in one of a
cluster's blocks, those of the next share in the next block. The others send theirs into its shared
memory, a thread to the same thread; it adds them in an order that is always the same. Blocks may
end by themselves: each has waited for all that is sent to it, and room is freed only for what will
come.
"""

from __future__ import annotations

import cutlass
from cutlass import cute, range_constexpr

from . import ptx
from .widened_config import Config

__all__ = ["Exchange"]


class Exchange:
    def __init__(self, config: Config):
        self.config = config

    def allocate(self, memory) -> None:
        """Room for others' sums, and for each share two barriers: all are there, or are free."""
        config = self.config
        nbytes = config.exchange_bytes(config.split)
        self.sums = memory.allocate_array(cutlass.Uint8, nbytes, byte_alignment=128).toint()
        self.full = memory.allocate_array(cutlass.Int64, 2 * config.shares)
        self.free = self.full + config.shares

    def initialize(self) -> None:
        config = self.config
        for i in range(config.shares):
            cute.arch.mbarrier_init(self.full + i, 1)  # and bytes
            cute.arch.mbarrier_init(self.free + i, 4)  # warps

    def place(self, share, thread, distance):
        """Of a thread's sums from the block so many after the one that adds, four at a time."""
        config = self.config
        index = (distance - 1) * config.own_shares + share // config.split
        return self.sums + index * config.share_bytes + thread * 16

    @cute.jit
    def send(self, share, sums, thread, phase, part):
        """Wait until the last sums have been read, then write these."""
        owner = share % self.config.split
        ptx.wait_cluster((self.free + share).toint(), phase ^ 1)
        distance = (part - owner) & (self.config.split - 1)
        place = ptx.at_block(self.place(share, thread, distance), owner)
        barrier = ptx.at_block((self.full + share).toint(), owner)
        for i in range_constexpr(0, self.config.tile[0] // 2, 4):
            ptx.store_async(place, i * 512, [sums[i + j] for j in range(4)], barrier)

    @cute.jit
    def receive(self, share, sums, thread, phase, more):
        """Add the sums of the other blocks. ``more``: whether others will be sent."""
        split = self.config.split
        full = (self.full + share).toint()
        if thread == 0:
            ptx.expect(full, (split - 1) * self.config.share_bytes)
        ptx.wait_cluster(full, phase)
        for distance in range_constexpr(1, split):
            place = self.place(share, thread, distance)
            for i in range_constexpr(0, self.config.tile[0] // 2, 4):
                values = ptx.load_floats(place, i * 512, 4)
                for j in range_constexpr(4):
                    sums[i + j] = sums[i + j] + values[j]
        if more:
            ptx.arrive_at_all((self.free + share).toint(), thread % 32, split)
