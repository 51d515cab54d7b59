# mypy: ignore-errors
"""Accumulators of a tile from warpgroups that each had a part of K, added up in shared memory.

Of two warpgroups of a CTA, each with every other K block, the second one writes its accumulators,
and the first one adds them: ``CtaReduce``.

Each CTA of a cluster adds up a share of the tile's columns and stores them. All of the cluster's
warpgroups send their accumulators of a share into its CTA: ``ClusterReduce``. Warps wait for no
others.

A thread writes for the same thread of another warpgroup. The order of sums is always the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute, range_constexpr

from ..common import shared
from . import ptx
from .product_config import ProductConfig

__all__ = ["ClusterReduce", "CtaReduce", "Room"]

_WARPS = 4  # of a warpgroup
_APART = 128 * 16  # bytes from four values of a thread to the next four


@dataclass(frozen=True)
class Room:
    """For partial accumulators, by address, and ``count`` mbarriers each: it is full, or free."""

    partial_acc: Any
    count: int
    full: Any
    free: Any

    @classmethod
    def allocate(cls, memory, nbytes: int, count: int) -> Room:
        partial_acc = shared.allocate(memory, nbytes, 128)
        full = memory.allocate_array(cutlass.Int64, 2 * count)
        return cls(partial_acc, count, full, full + count)

    @classmethod
    def of_product(cls, memory, config: ProductConfig) -> Room:
        return cls.allocate(memory, config.reduce_bytes, 1 if config.split_k == 1 else _WARPS)

    def init_barriers(self, full: int, free: int) -> None:
        """With so many arrivals each."""
        for i in range(self.count):
            cute.arch.mbarrier_init(self.full + i, full)
            cute.arch.mbarrier_init(self.free + i, free)


class CtaReduce:
    """A thread's side of a reduction in a CTA."""

    def __init__(self, config: ProductConfig, room: Room, k_part, k_turn, thread):
        self.config, self.room, self.thread = config, room, thread

    def quads(self, acc):
        """Four at a time: their tensor, the first of them, and how far apart they are kept."""
        each = self.config.mma_n // 2
        return [(acc[i // each], i % each, i * 512) for i in range(0, each * len(acc), 4)]

    @cute.jit
    def send(self, acc, phase):
        """Wait until the last ones have been read, then write these."""
        cute.arch.mbarrier_wait(self.room.free, phase ^ 1)
        address = self.room.partial_acc + self.thread * 16
        for values, first, offset in self.quads(acc):
            ptx.st_shared(address, [values[first + j] for j in range(4)], offset)
        cute.arch.mbarrier_arrive(self.room.full)

    @cute.jit
    def receive(self, acc, phase):
        """Add those of the other warpgroup."""
        cute.arch.mbarrier_wait(self.room.full, phase)
        address = self.room.partial_acc + self.thread * 16
        for values, first, offset in self.quads(acc):
            partial_acc = ptx.ld_shared(address, offset, 4)
            for j in range_constexpr(4):
                values[first + j] = values[first + j] + partial_acc[j]
        cute.arch.mbarrier_arrive(self.room.free)


class ClusterReduce:
    """A thread's side of a reduction in a cluster, in whose CTA ``k_part`` it is."""

    def __init__(self, config: ProductConfig, room: Room, k_part, k_turn, thread):
        self.config, self.k_part, self.lane = config, k_part, thread % 32
        self.sources = 2 * config.split_k  # warpgroups, of each CTA the one of ``k_turn`` 0 first
        self.share_bytes = config.reduce_bytes // self.sources
        warp = cute.arch.make_warp_uniform(thread // 32)
        self.received = room.partial_acc + thread * 16
        self.sent = self.received + (2 * k_part + k_turn) * self.share_bytes
        self.full, self.free = ((each + warp).toint() for each in (room.full, room.free))

    def quads(self, acc, share: int) -> list:
        """Four of a share's values at a time: their tensor, the first of them, where they lie."""
        config, found = self.config, []
        begin = share * config.own_columns
        for row_step in range(config.row_steps):
            for column in range(begin, begin + config.own_columns, 8):
                mma, first = config.place(row_step, column)
                found.append((acc[mma], first, len(found) * _APART))
        return found

    @cute.jit
    def send(self, acc, phase, filled):
        """Wait until the last ones have been read, then send these. Of a warp whose rows are not
        ``filled``, being below the last one, a few: others know by them how far it is."""
        split_k = self.config.split_k
        ptx.mbarrier_wait_cluster(self.free, phase ^ 1)
        if filled:
            for part in range_constexpr(split_k):
                if self.k_part == part:
                    for i in range_constexpr(split_k):  # not all CTAs to the same one at once
                        share = (part + i + 1) % split_k
                        self.send_quads(self.quads(acc, share), share)
        elif self.lane == 0:
            for share in range_constexpr(split_k):
                self.send_quads(self.quads(acc, share)[:1], share)

    def send_quads(self, quads: list, share: int) -> None:
        address, barrier = (ptx.mapa(each, Int32(share)) for each in (self.sent, self.full))
        for values, first, offset in quads:
            ptx.st_async(address, offset, [values[first + j] for j in range(4)], barrier)

    @cute.jit
    def receive(self, acc, phase, filled, more):
        """This CTA's share of the total, where the first share was. ``more``: whether others will
        be sent."""
        if self.lane == 0:
            nbytes = Int32(self.sources * 16)
            if filled:
                nbytes = Int32(self.sources * self.share_bytes // _WARPS)
            ptx.mbarrier_arrive_expect_tx(self.full, nbytes)
        ptx.mbarrier_wait_cluster(self.full, phase)
        if filled:
            for values, first, offset in self.quads(acc, 0):
                total = [Float32(0)] * 4
                for i in range_constexpr(self.sources):
                    partial_acc = ptx.ld_shared(self.received, i * self.share_bytes + offset, 4)
                    total = [total[j] + partial_acc[j] for j in range(4)]
                for j in range_constexpr(4):
                    values[first + j] = total[j]
        if more:
            ptx.mbarrier_arrive_release_cluster(self.free, self.lane, self.config.split_k)
