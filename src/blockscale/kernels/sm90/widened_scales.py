# mypy: ignore-errors
"""Block scales of B in a stage, from global memory to shared memory: three warps' work."""

from __future__ import annotations

from cutlass import Int32, const_expr, cute, range_constexpr

from . import ptx, widened_ptx
from .widened_config import B_ROWS, Config

__all__ = ["Scales"]


class Scales:
    threads = 96

    def __init__(self, config: Config):
        self.config = config

    @cute.jit
    def __call__(self, scale, shared, first, block, thread):
        """A tile's rows from ``first`` on; zeros outside of ``scale`` (N, K / block)."""
        nbytes = self.config.scale_row
        column = block * nbytes
        for i in range_constexpr(-(-B_ROWS // self.threads)):
            row = i * self.threads + thread
            if row < B_ROWS:
                inside = Int32(first + row < scale.shape[0])
                target = shared + row * nbytes
                at = (first + row) * inside
                if const_expr(self.config.async_scales):
                    source = scale.iterator.toint() + scale.layout((at, column))
                    widened_ptx.copy_async(target, source, nbytes, inside)
                else:
                    for j in range_constexpr(nbytes):
                        value = Int32(0)
                        if inside == 1 and column + j < scale.shape[1]:
                            value = Int32(scale[at, column + j])
                        widened_ptx.store_byte(target + j, value)

    @cute.jit
    def prefetch(self, scale, first, block, thread):
        """Bring scales of the same rows, of this block and some after it, to the L2 cache."""
        for i in range_constexpr(-(-B_ROWS // self.threads)):
            row = i * self.threads + thread
            if row < B_ROWS and first + row < scale.shape[0]:
                place = scale.layout((first + row, block * self.config.scale_row))
                widened_ptx.prefetch(scale.iterator.toint() + place)

    def arrive(self, barrier) -> None:
        if self.config.async_scales:
            widened_ptx.arrive_when_copied(barrier)
        else:
            ptx.arrive(barrier)
