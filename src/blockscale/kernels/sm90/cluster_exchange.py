# mypy: ignore-errors
"""Sums of a tile from blocks of threads that each had a part of K, brought together.

Each block of a cluster adds up a share of the tile's columns and stores them. All of a cluster's
warpgroups send their sums of a share into its block's shared memory, a thread to the same thread:
warps wait for no others. They are added in an order that is always the same.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute, range_constexpr

from . import ptx
from .product_config import ProductConfig

__all__ = ["ClusterExchange"]

_WARPS = 4  # of a warpgroup
_APART = 128 * 16  # bytes from four sums of a thread to the next four


class ClusterExchange:
    def __init__(self, config: ProductConfig):
        self.config, self.sources = config, 2 * config.split
        self.share_bytes = config.exchange_bytes // self.sources

    def allocate(self, memory) -> None:
        """Room for a share of each warpgroup, and two barriers a warp: they are there, or free."""
        nbytes = self.config.exchange_bytes
        self.sums = memory.allocate_array(cutlass.Uint8, nbytes, byte_alignment=128).toint()
        self.full = memory.allocate_array(cutlass.Int64, 2 * _WARPS)
        self.free = self.full + _WARPS

    def initialize(self) -> None:
        for i in range(_WARPS):
            cute.arch.mbarrier_init(self.full + i, 1)  # and bytes
            cute.arch.mbarrier_init(self.free + i, self.config.split)

    def start(self, part, half, thread) -> None:
        """``part``: this block in its cluster. ``half``: this warpgroup in its block."""
        warp = cute.arch.make_warp_uniform(thread // 32)
        self.part, self.lane = part, thread % 32
        self.mine = self.sums + thread * 16  # from the first of all warpgroups
        self.sent = self.mine + (2 * part + half) * self.share_bytes
        self.full_mine, self.free_mine = ((each + warp).toint() for each in (self.full, self.free))

    def quads(self, sums, share: int) -> list:
        """Four of a share's sums at a time: their batch, the first of them, where they are kept."""
        config, found = self.config, []
        first = share * config.own_columns
        for row_step in range(config.row_steps):
            for column in range(first, first + config.own_columns, 8):
                batch, at = config.place(row_step, column)
                found.append((sums[batch], at, len(found) * _APART))
        return found

    @cute.jit
    def send(self, sums, phase, filled):
        """Wait until the last sums have been read, then send these. Of a warp whose rows are not
        ``filled``, being below the last one, a few: others know by them how far it is."""
        split = self.config.split
        ptx.wait_cluster(self.free_mine, phase ^ 1)
        if filled:
            for part in range_constexpr(split):
                if self.part == part:
                    for i in range_constexpr(split):  # not all blocks to the same one at once
                        share = (part + i + 1) % split
                        self.send_quads(self.quads(sums, share), share)
        elif self.lane == 0:
            for share in range_constexpr(split):
                self.send_quads(self.quads(sums, share)[:1], share)

    def send_quads(self, quads: list, share: int) -> None:
        place, barrier = (ptx.at_block(each, Int32(share)) for each in (self.sent, self.full_mine))
        for batch, first, offset in quads:
            ptx.store_async(place, offset, [batch[first + j] for j in range(4)], barrier)

    @cute.jit
    def receive(self, sums, phase, filled, more):
        """This block's share of all sums, where those of the first share were. ``more``: whether
        others will be sent."""
        if self.lane == 0:
            nbytes = Int32(self.sources * 16)
            if filled:
                nbytes = Int32(self.sources * self.share_bytes // _WARPS)
            ptx.expect(self.full_mine, nbytes)
        ptx.wait_cluster(self.full_mine, phase)
        if filled:
            for batch, first, offset in self.quads(sums, 0):
                total = [Float32(0)] * 4
                for i in range_constexpr(self.sources):
                    values = ptx.load_floats(self.mine, i * self.share_bytes + offset, 4)
                    total = [total[j] + values[j] for j in range(4)]
                for j in range_constexpr(4):
                    batch[first + j] = total[j]
        if more:
            ptx.arrive_at_all(self.free_mine, self.lane, self.config.split)
