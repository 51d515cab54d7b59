# mypy: ignore-errors
"""Shared memory of a block of threads, by address."""

from __future__ import annotations

import cutlass
from cutlass import Uint32, cute, range_constexpr

from . import ptx

__all__ = ["allocate", "clear"]


def allocate(memory, nbytes: int, align: int = 16):
    """The address of ``nbytes`` that are ``align`` bytes aligned."""
    return memory.allocate_array(cutlass.Uint8, nbytes, byte_alignment=align).toint()


@cute.jit
def clear(address, nbytes: cutlass.Constexpr, threads: cutlass.Constexpr):
    """Set a multiple of 4 bytes to zero by all ``threads`` of the block."""
    thread = cute.arch.thread_idx()[0]
    for i in range_constexpr(cute.ceil_div(nbytes, 4 * threads)):
        position = (i * threads + thread) * 4
        if position < nbytes:
            ptx.store_shared(address + position, [Uint32(0)], 4)
