# mypy: ignore-errors
"""Shared memory of a CTA, by address."""

from __future__ import annotations

import cutlass
from cutlass import Uint32, cute, range_constexpr

from . import ptx

__all__ = ["allocate", "clear"]


def allocate(memory, nbytes: int, align: int = 16):
    """The address of ``nbytes`` that are ``align`` bytes aligned."""
    return memory.allocate_array(cutlass.Uint8, nbytes, byte_alignment=align).toint()


@cute.jit
def clear(
    address, nbytes: cutlass.Constexpr, threads: cutlass.Constexpr, vector: cutlass.Constexpr = 4
):
    """Set a multiple of ``vector`` bytes (4, 8 or 16), which a thread stores at once, to zero by
    all ``threads`` of the block."""
    thread = cute.arch.thread_idx()[0]
    for i in range_constexpr(cute.ceil_div(nbytes, vector * threads)):
        position = (i * threads + thread) * vector
        if position < nbytes:
            ptx.store_shared(address + position, [Uint32(0)] * (vector // 4), vector)
