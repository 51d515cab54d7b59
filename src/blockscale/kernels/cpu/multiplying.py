# mypy: ignore-errors
"""A few rows by a quantized matrix, whose fp32 values never reach memory.

Each row of the matrix is decoded into the level-1 cache, a segment at a time, and multiplied there.
The sum over a segment is that of :func:`intrinsics.dot32`, those of segments are added one after
the other: the order does not depend on the processor, on threads or on the other rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...jit import compiled, spliced
from . import decoding
from .intrinsics import dot32

SEGMENT = 2048  # columns; whole blocks of each format
LANES = 32  # partial sums of a segment


class Scratch(NamedTuple):
    """Memory for what the passes over a segment leave to each other."""

    decoding: decoding.Scratch
    line: np.ndarray  # fp32 bits (int32) of a segment
    sums: np.ndarray  # fp32, one a row of x


def make_scratch(m: int) -> Scratch:
    return Scratch(
        decoding.make_scratch(SEGMENT),
        np.empty(SEGMENT, np.int32),
        np.empty(m, np.float32),
    )


@compiled
def _fill(line, first, last):
    for c in range(first, last):
        line[c] = 0


@spliced
def multiply_rows(
    x, data, scale8, scale32, out, geometry, spec, values, scales, global_scale, least, scratch,
    first, last,
):  # fmt: skip
    """Columns ``first`` to ``last`` of ``out`` (M, N): ``x`` (M, K) by these rows of a (N, K).

    ``x`` and ``out`` are fp32, flat, and contiguous; rows of ``x`` are padded with zeros to a
    multiple of ``LANES``. The rest is as of ``dequantize_tiles``.
    """
    g = geometry
    size = g.block_columns
    scale_columns, length = -(-g.columns // size), -(-g.columns // LANES) * LANES
    line, sums = scratch.line, scratch.sums
    for row in range(first, last):
        for m in range(sums.size):
            sums[m] = 0
        for left in range(0, g.columns, SEGMENT):
            n = min(SEGMENT, g.columns - left)
            at = row // g.block_rows * scale_columns + left // size
            marks = decoding.spread_scales(
                scale8, scale32, scales, at, n, size, least, scratch.decoding
            )
            start = (row * g.data_columns + left) * spec.bits // 8
            decoding.decode_line(
                data[start:], n, spec, values, size, global_scale, least, marks,
                scratch.decoding, line[:n],
            )  # fmt: skip
            padded = -(-n // LANES) * LANES
            _fill(line, n, padded)
            for m in range(sums.size):
                sums[m] += dot32(x, m * length + left, line, padded)
        for m in range(sums.size):
            out[m * g.rows + row] = sums[m]
