"""Which element of a matrix each register holds.

Of a warpgroup: wgmma, PTX ISA 9.7.15.5.1.1. The ISA has figures only; these are CUTLASS's
ALayout_64x* and CLayout_64xN in words: thread t has rows t % 32 / 4 and 8 more of the 16 rows of
its warp, and registers come in pairs of these rows. Of a warp: mma.sync, PTX ISA 9.7.14.5, alike.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .operands import frozen

__all__ = ["accumulator_fragment", "operand_fragment", "warp_matrix", "warp_registers"]


@lru_cache
def accumulator_fragment(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of D (64 x n), each (128 threads, n / 2 elements d0, d1, ...).

    f32 and s32: element i is register i. f16: it is half i % 2 (0 is low) of register i // 2.
    """
    if n % 8 or not 8 <= n <= 256:
        raise ValueError(f"n is {n}, allowed: multiples of 8 from 8 to 256")
    return _fragment(2, n // 4)


@lru_cache
def operand_fragment(element_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and k of A (64 x 256 / element_bits), each (128 threads, elements a0, a1, ...).

    Four registers, 32 / element_bits elements in each, the first in the lowest bits.
    ``element_bits``: 8, 16 or 32.
    """
    if element_bits not in (8, 16, 32):
        raise ValueError(f"element_bits is {element_bits}, allowed: 8, 16, 32")
    return _fragment(32 // element_bits, 4)


def _fragment(packed: int, registers: int) -> tuple[np.ndarray, np.ndarray]:
    """``packed`` elements side by side in a register, or in the pair that stands for one."""
    thread = np.arange(128)[:, None]
    register, place = np.divmod(np.arange(registers * packed)[None, :], packed)
    rows = thread // 32 * 16 + thread % 32 // 4 + register % 2 * 8
    columns = register // 2 * 4 * packed + thread % 4 * packed + place
    return frozen(np.broadcast_to(rows, columns.shape)), frozen(columns)


def warp_matrix(registers: np.ndarray, rows: int, beside: int) -> np.ndarray:
    """Registers (warps, 32, registers) of mma.sync as matrices (warps, rows, words of a row).

    rows: 16 of A, C and D, 8 of B, whose rows are the columns of the product.
    beside: registers that follow each other in a row: 2 of C and D in 32 bits, 1 of all others.
    """
    lanes = registers.reshape(len(registers), 8, 4, -1, rows // 8, beside)
    return lanes.transpose(0, 4, 1, 3, 2, 5).reshape(len(registers), rows, -1)


def warp_registers(matrix: np.ndarray, beside: int) -> np.ndarray:
    """What ``warp_matrix`` was made of."""
    warps, rows, _ = matrix.shape
    lanes = matrix.reshape(warps, rows // 8, 8, -1, 4, beside)
    return lanes.transpose(0, 2, 4, 3, 1, 5).reshape(warps, 32, -1)
