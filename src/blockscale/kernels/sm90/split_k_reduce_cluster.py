# mypy: ignore-errors
"""Accumulators of a tile from the CTAs of a cluster, which each had a part of K, added up.

Each CTA adds up a share of the tile's columns and stores them. All of a cluster's warpgroups send
their partial accumulators of a share into its CTA's shared memory, a thread to the same thread:
warps wait for no others. They are added in an order that is always the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute, range_constexpr

from ..common import shared
from . import ptx
from .product_config import ProductConfig

__all__ = ["ClusterReduce"]

_WARPS = 4  # of a warpgroup
_APART = 128 * 16  # bytes from four values of a thread to the next four


@dataclass(frozen=True)
class ClusterReduce:
    """Room for a share of each of a cluster's warpgroups.

    Attributes:
        partial_acc: its address.
        full, free: mbarriers, one a warp.
    """

    config: ProductConfig
    partial_acc: Any
    full: Any
    free: Any

    @classmethod
    def allocate(cls, config: ProductConfig, memory) -> ClusterReduce:
        partial_acc = shared.allocate(memory, config.reduce_bytes, 128)
        full = memory.allocate_array(cutlass.Int64, 2 * _WARPS)
        return cls(config, partial_acc, full, full + _WARPS)

    def init_barriers(self) -> None:
        for i in range(_WARPS):
            cute.arch.mbarrier_init(self.full + i, 1)  # and bytes
            cute.arch.mbarrier_init(self.free + i, self.config.split_k)

    def of_thread(self, k_part, warpgroup, thread) -> ThreadReduce:
        """``k_part``: of this CTA, its place in the cluster."""
        config, warp = self.config, cute.arch.make_warp_uniform(thread // 32)
        mine = self.partial_acc + thread * 16
        sent = mine + (2 * k_part + warpgroup) * (config.reduce_bytes // (2 * config.split_k))
        full, free = ((each + warp).toint() for each in (self.full, self.free))
        return ThreadReduce(config, k_part, thread % 32, mine, sent, full, free)


@dataclass(frozen=True)
class ThreadReduce:
    """A thread's side of it.

    Attributes:
        k_part: of this CTA.
        received, sent: addresses of a share from the first of all warpgroups, and from this one.
        full, free: addresses of its warp's mbarriers.
    """

    config: ProductConfig
    k_part: Any
    lane: Any
    received: Any
    sent: Any
    full: Any
    free: Any

    @property
    def sources(self) -> int:
        return 2 * self.config.split_k

    @property
    def share_bytes(self) -> int:
        return self.config.reduce_bytes // self.sources

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
        split = self.config.split_k
        ptx.mbarrier_wait_cluster(self.free, phase ^ 1)
        if filled:
            for part in range_constexpr(split):
                if self.k_part == part:
                    for i in range_constexpr(split):  # not all CTAs to the same one at once
                        share = (part + i + 1) % split
                        self.send_quads(self.quads(acc, share), share)
        elif self.lane == 0:
            for share in range_constexpr(split):
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
