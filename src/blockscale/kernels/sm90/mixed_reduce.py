# mypy: ignore-errors
"""Accumulators of a tile from warpgroups that each had a part of K, added up.

A share is 64 of the tile's rows of B, those of one wgmma. Its accumulators are added up in one of a
cluster's CTAs, by the first warpgroup there that has the share; those of the next share in the next
CTA. The others, of the same CTA too, write theirs into its shared memory, a thread to the same
thread; that one adds them in an order that is always the same. CTAs may end by themselves: each has
waited for all that is sent to it, and room is freed only for what will come.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import const_expr, cute, range_constexpr

from . import ptx
from .mixed_config import WARPGROUPS, Config
from .split_k_reduce import Room

__all__ = ["MixedReduce"]


@dataclass(frozen=True)
class MixedReduce:
    """With mbarriers for each share."""

    config: Config
    room: Room

    @classmethod
    def allocate(cls, config: Config, memory) -> MixedReduce:
        nbytes = config.reduce_bytes(config.split_k, config.warpgroup_split_k)
        return cls(config, Room.allocate(memory, nbytes, WARPGROUPS))

    def init_barriers(self) -> None:
        # one that expects bytes of other CTAs, and threads of its own; warps
        self.room.init_barriers(1 + 128 * (self.config.warpgroup_split_k - 1), 4)

    def place(self, share, thread, source):
        """Of a thread's from the warpgroup so many after the one that adds, four at a time."""
        config = self.config
        index = (source - 1) * config.own_shares + share // config.split_k
        return self.room.partial_acc + index * config.share_bytes + thread * 16

    @cute.jit
    def send(self, share, acc, thread, phase, k_part, turn):
        """Wait until the last ones have been read, then write these, of the ``turn``-th warpgroup
        that has them in the CTA ``k_part`` of the cluster."""
        config = self.config
        owner, full = share % config.split_k, (self.room.full + share).toint()
        ptx.mbarrier_wait_cluster((self.room.free + share).toint(), phase ^ 1)
        source = (
            k_part + config.split_k - owner
        ) % config.split_k * config.warpgroup_split_k + turn
        place = self.place(share, thread, source)
        if k_part == owner:
            for i in range_constexpr(0, config.rows // 2, 4):
                ptx.st_shared(place, [acc[i + j] for j in range(4)], i * 512)
            ptx.mbarrier_arrive(full)
        elif const_expr(config.split_k > 1):
            there, barrier = (ptx.mapa(each, owner) for each in (place, full))
            for i in range_constexpr(0, config.rows // 2, 4):
                ptx.st_async(there, i * 512, [acc[i + j] for j in range(4)], barrier)

    @cute.jit
    def receive(self, share, acc, thread, phase, more):
        """Add those of the other warpgroups. ``more``: whether others will be sent."""
        config = self.config
        full = (self.room.full + share).toint()
        if thread == 0:
            ptx.mbarrier_arrive_expect_tx(
                full, (config.sources - config.warpgroup_split_k) * config.share_bytes
            )
        ptx.mbarrier_wait_cluster(full, phase)
        for source in range_constexpr(1, config.sources):
            place = self.place(share, thread, source)
            for i in range_constexpr(0, config.rows // 2, 4):
                partial_acc = ptx.ld_shared(place, i * 512, 4)
                for j in range_constexpr(4):
                    acc[i + j] = acc[i + j] + partial_acc[j]
        if more:
            ptx.mbarrier_arrive_release_cluster(
                (self.room.free + share).toint(), thread % 32, config.split_k
            )
