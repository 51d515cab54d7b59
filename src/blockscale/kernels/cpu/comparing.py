# mypy: ignore-errors
"""Decode and compare with what was quantized, tile by tile, in one pass over both.

A tile's sums of squares are its own, so they do not depend on who adds up which tiles; all else is
counted in integers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...error_sums import BINS
from ...jit import compiled, spliced
from . import decoding
from .arith import INF, fp32
from .intrinsics import as_bits, as_float, fill16, shr, squares16
from .spec import Geometry

_MASK = 0x7FFFFFFF
ZEROS, WERE_ZEROS, SATURATED, NONFINITE, MAX_ABS, MAX_REL = range(6)  # of counts


class Scratch(NamedTuple):
    """Memory for what the passes over a tile leave to each other, and counts of all tiles."""

    decoding: decoding.Scratch
    exact: np.ndarray  # fp32 bits (int32), as the next four
    values: np.ndarray
    error: np.ndarray
    limit: np.ndarray
    bin: np.ndarray
    counts: np.ndarray  # int64
    bins: np.ndarray  # four of each: neighbours in one bin need not wait for each other


def make_scratch(geometry: Geometry) -> Scratch:
    return Scratch(
        decoding.make_scratch(geometry.width),
        *np.empty((5, geometry.width), np.int32),
        np.zeros(6, np.int64),
        np.zeros(4 * BINS, np.int64),
    )


@compiled
def _squares(numbers, n):
    for c in range(n, -(-n // 16) * 16):
        numbers[c] = 0
    total = 0.0
    for c in range(0, n, 16):
        total += squares16(numbers, c)
    return total


@compiled
def _widen(row, exact, values):
    """x as fp32 bits; whether all of it and of ``values`` is finite."""
    largest = np.int32(0)
    for c in range(row.size):
        v = fp32(row[c])
        exact[c] = v
        both = max(np.int32(v & np.int32(_MASK)), np.int32(values[c] & np.int32(_MASK)))
        largest = max(largest, both)
    return largest < np.int32(INF)


@compiled
def _leave_out(n, exact, values):
    """Zeros in the place of what is not finite; how many there are."""
    count = 0
    for c in range(n):
        if (exact[c] & _MASK) >= INF or (values[c] & _MASK) >= INF:
            exact[c] = values[c] = 0
            count += 1
    return count


@compiled
def _compare(exact, values, limit, error, bin, counts):
    """Counts of a line. All numbers are fp32 bits, whose order is that of magnitudes."""
    mask = np.int32(_MASK)
    zeros, were_zeros, saturated = np.int32(0), np.int32(0), np.int32(0)
    max_abs, max_rel = np.int32(0), np.int32(0)
    for c in range(exact.size):
        m = np.int32(exact[c] & mask)
        d = np.int32(as_bits(as_float(values[c]) - as_float(exact[c])) & mask)
        ratio = as_bits(as_float(d) / as_float(m))
        ratio = ratio if m > 0 else np.int32(0)
        error[c] = d
        bin[c] = shr(ratio, np.int32(22))
        max_abs, max_rel = max(max_abs, d), max(max_rel, ratio)
        zeros = np.int32(zeros + np.int32(np.int32(values[c] & mask) == 0))
        were_zeros = np.int32(were_zeros + np.int32(m == 0))
        saturated = np.int32(saturated + np.int32(m > limit[c]))
    counts[ZEROS] += zeros
    counts[WERE_ZEROS] += were_zeros
    counts[SATURATED] += saturated
    counts[MAX_ABS] = max(counts[MAX_ABS], np.int64(max_abs))
    counts[MAX_REL] = max(counts[MAX_REL], np.int64(max_rel))


@compiled
def _count(bin, n, bins):
    for c in range(n):
        bins[(c & 3) * BINS + (bin[c] & (BINS - 1))] += 1


@spliced
def compare_tiles(
    x, data, scale8, scale32, geometry, spec, values, scales, global_scale, least, largest, scratch,
    sums, first, last,
):  # fmt: skip
    """Compare tiles ``first`` to ``last`` with ``x``; ``sums`` (2 for each tile) are of squares.

    ``largest`` is what a block of scale 1 can hold, as fp32 bits; else see ``dequantize_tiles``.
    """
    g = geometry
    size, width = g.block_columns, g.width
    factor, top_value = as_float(np.int32(global_scale)), as_float(np.int32(largest))
    scale_columns = -(-g.columns // size)
    for tile in range(first, last):
        lead, strip = tile // (g.strips * g.segments), tile // g.segments % g.strips
        top, left = strip * g.block_rows, tile % g.segments * width
        n = min(width, g.columns - left)
        at = (lead * g.strips + strip) * scale_columns + left // size
        marks = decoding.spread_scales(
            scale8, scale32, scales, at, n, size, least, scratch.decoding
        )
        for b in range(-(-n // size)):
            limit = as_bits(as_float(scratch.decoding.scale_bits[b]) * factor * top_value)
            for i in range(b * size, b * size + size, 16):
                fill16(scratch.limit, i, np.int32(limit & np.int32(_MASK)))
        signal = noise = 0.0
        exact, line = scratch.exact[:n], scratch.values[:n]
        for r in range(min(g.block_rows, g.rows - top)):
            start = ((lead * g.data_rows + top + r) * g.data_columns + left) * spec.bits // 8
            decoding.decode_line(
                data[start:], n, spec, values, size, global_scale, least, marks,
                scratch.decoding, line,
            )  # fmt: skip
            start = lead * g.lead_stride + (top + r) * g.row_stride + left
            if not _widen(x[start : start + n], exact, line):
                scratch.counts[NONFINITE] += _leave_out(n, exact, line)
            _compare(exact, line, scratch.limit, scratch.error, scratch.bin, scratch.counts)
            _count(scratch.bin, n, scratch.bins)
            signal += _squares(scratch.exact, n)
            noise += _squares(scratch.error, n)
        sums[2 * tile] = signal
        sums[2 * tile + 1] = noise
