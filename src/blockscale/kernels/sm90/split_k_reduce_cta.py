# mypy: ignore-errors
"""Accumulators of a tile from two warpgroups, each of which had every other K block, added up.

The second one writes its partial accumulators to shared memory, from which the first one adds them:
a thread those of the same thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import cute, range_constexpr

from ..common import shared
from . import ptx
from .product_config import ProductConfig

__all__ = ["CtaReduce"]


@dataclass(frozen=True)
class CtaReduce:
    """Room for a tile.

    Attributes:
        partial_acc: its address.
        full, free: mbarriers.
    """

    config: ProductConfig
    partial_acc: Any
    full: Any
    free: Any

    @classmethod
    def allocate(cls, config: ProductConfig, memory) -> CtaReduce:
        partial_acc = shared.allocate(memory, config.reduce_bytes, 128)
        full = memory.allocate_array(cutlass.Int64, 2)
        return cls(config, partial_acc, full, full + 1)

    def init_barriers(self) -> None:
        for barrier in (self.full, self.free):
            cute.arch.mbarrier_init(barrier, 128)

    def quads(self, acc):
        """Four at a time: their tensor, the first of them, and how far apart they are kept."""
        each = self.config.mma_n // 2
        return [(acc[i // each], i % each, i * 512) for i in range(0, each * len(acc), 4)]

    @cute.jit
    def send(self, acc, thread, phase):
        """Wait until the last ones have been read, then write these."""
        cute.arch.mbarrier_wait(self.free, phase ^ 1)
        address = self.partial_acc + thread * 16
        for values, first, offset in self.quads(acc):
            ptx.st_shared_v4(address, offset, [values[first + j] for j in range(4)])
        cute.arch.mbarrier_arrive(self.full)

    @cute.jit
    def receive(self, acc, thread, phase):
        """Add those of the other warpgroup."""
        cute.arch.mbarrier_wait(self.full, phase)
        address = self.partial_acc + thread * 16
        for values, first, offset in self.quads(acc):
            partial_acc = ptx.ld_shared(address, offset, 4)
            for j in range_constexpr(4):
                values[first + j] = values[first + j] + partial_acc[j]
        cute.arch.mbarrier_arrive(self.free)
