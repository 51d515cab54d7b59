# mypy: ignore-errors
"""Many rows: products of pairs of bfloat16, in tiles whose fp32 sums stay in registers."""

from __future__ import annotations

import numpy as np

from ...jit import spliced
from .arith import store
from .intrinsics import ROWS, TILE, as_bits, dot_tile


def make_scratch() -> np.ndarray:
    return np.empty(ROWS * TILE, np.float32)


@spliced
def multiply_tiles(a, b, out, m, n, pairs, panels, a_scalar, b_scalar, sums, first, last):
    """Panels ``first`` to ``last`` of columns of ``out`` (M, N), int32: fp32, uint16: bfloat16.

    ``a`` and ``b`` are pairs (int32), those of ``a`` in ``panels``, those of ``b`` in interleaved
    ones of ``TILE``. Each sum is of pairs in order, then times the two global scales.
    """
    for panel in range(first, last):
        columns = min(TILE, n - panel * TILE)
        for top in range(0, m, ROWS):
            start = top // panels.width * panels.size + top % panels.width * panels.row_step
            left, right = a[start:], b[panel * TILE * pairs :]
            dot_tile(left, panels.row_step, panels.pair_step, right, pairs, sums)
            for r in range(min(ROWS, m - top)):
                to = (top + r) * n + panel * TILE
                line, row = out[to : to + columns], sums[r * TILE : r * TILE + columns]
                for c in range(columns):
                    store(line, c, as_bits(row[c] * a_scalar * b_scalar))
