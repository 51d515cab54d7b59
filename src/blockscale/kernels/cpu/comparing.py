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
from .intrinsics import as_bits, as_float, fill16, shr, squares
from .spec import Geometry

_MASK = 0x7FFFFFFF
ZEROS, WERE_ZEROS, SATURATED, NONFINITE, MAX_ABS, MAX_REL = range(6)  # of counts


#: The relative error of an element, |difference| / |x|, is no less than 2^-24, or 0: of two fp32
#: numbers that are near each other the difference is exact. So 62 bins, up to 2^6, hold all but
#: oddities; two elements are counted at once in a table of pairs.
_FIRST = 2 * (127 - 25) - 1
_SLOTS = 64


class Scratch(NamedTuple):
    """Memory for what the passes over a tile leave to each other, and counts of all tiles."""

    decoding: decoding.Scratch
    exact: np.ndarray  # fp32 bits (int32), as the next three
    values: np.ndarray
    error: np.ndarray
    limit: np.ndarray
    slot: np.ndarray  # uint16
    counts: np.ndarray  # int64
    bins: np.ndarray
    pairs: np.ndarray  # how often each two slots were counted together


def make_scratch(geometry: Geometry) -> Scratch:
    return Scratch(
        decoding.make_scratch(geometry.width),
        *np.empty((4, geometry.width), np.int32),
        np.empty(geometry.width, np.uint16),
        np.zeros(6, np.int64),
        np.zeros(BINS, np.int64),
        np.zeros(_SLOTS * _SLOTS, np.int32),
    )


def bins_of(scratch: Scratch) -> np.ndarray:
    """How often each relative error occurred: counts of pairs, and of single elements."""
    bins, pairs = scratch.bins.copy(), scratch.pairs.reshape(_SLOTS, _SLOTS)
    slots = pairs.sum(0, dtype=np.int64) + pairs.sum(1, dtype=np.int64)
    bins[0] += slots[0]
    bins[_FIRST + 1 : _FIRST + _SLOTS] += slots[1:]
    return bins


@compiled
def _widen(row, exact):
    """x as fp32 bits."""
    for c in range(row.size):
        exact[c] = fp32(row[c])


@compiled
def _leave_out(exact, values):
    """Zeros in the place of what is not finite; how many there are."""
    count = 0
    for c in range(exact.size):
        if (exact[c] & _MASK) >= INF or (values[c] & _MASK) >= INF:
            exact[c] = values[c] = 0
            count += 1
    return count


@compiled
def _compare(row, values, limit, exact, error, slot, counts):
    """Write magnitudes, differences and slots of a line, and add up what is counted of it, unless
    some of it is not finite. Returns the largest magnitude, which tells that, and the largest slot.

    All numbers are fp32 bits, whose order is that of magnitudes.
    """
    mask, first = np.int32(_MASK), np.int32(_FIRST)
    zeros, were_zeros, saturated = np.int32(0), np.int32(0), np.int32(0)
    max_abs, max_rel, largest = np.int32(0), np.int32(0), np.int32(0)
    for c in range(row.size):
        e, v = fp32(row[c]), values[c]
        m, w = np.int32(e & mask), np.int32(v & mask)
        d = np.int32(as_bits(as_float(v) - as_float(e)) & mask)
        ratio = as_bits(as_float(d) / as_float(m))
        ratio = ratio if m > 0 else np.int32(0)
        exact[c], error[c] = m, d
        slot[c] = np.uint16(max(np.int32(shr(ratio, np.int32(22)) - first), np.int32(0)))
        max_abs, max_rel = max(max_abs, d), max(max_rel, ratio)
        largest = max(largest, m, w)
        zeros = np.int32(zeros + np.int32(w == 0))
        were_zeros = np.int32(were_zeros + np.int32(m == 0))
        saturated = np.int32(saturated + np.int32(m > limit[c]))
    if largest < np.int32(INF):
        counts[ZEROS] += zeros
        counts[WERE_ZEROS] += were_zeros
        counts[SATURATED] += saturated
        counts[MAX_ABS] = max(counts[MAX_ABS], np.int64(max_abs))
        counts[MAX_REL] = max(counts[MAX_REL], np.int64(max_rel))
    return largest, np.int32(shr(max_rel, np.int32(22)) - first)


@compiled
def _count(slot, pairs):
    """Elements of both halves of a line, side by side."""
    half = slot.size // 2
    for c in range(half):
        pairs[slot[c] | slot[c + half] << 6] += 1


@compiled
def _count_each(exact, error, bins):
    """By the ratio anew, whatever it is."""
    for c in range(exact.size):
        ratio = as_bits(as_float(error[c]) / as_float(exact[c]))
        bins[shr(ratio, np.int32(22)) & (BINS - 1) if exact[c] > 0 else 0] += 1


@compiled
def _squares(numbers, n):
    padded = -(-n // 16) * 16
    for c in range(n, padded):
        numbers[c] = 0
    return squares(numbers, padded)


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
        line = scratch.values[:n]
        for r in range(min(g.block_rows, g.rows - top)):
            start = ((lead * g.data_rows + top + r) * g.data_columns + left) * spec.bits // 8
            decoding.decode_line(
                data[start:], n, spec, values, size, global_scale, least, marks,
                scratch.decoding, line,
            )  # fmt: skip
            start = lead * g.lead_stride + (top + r) * g.row_stride + left
            s, counts = scratch, scratch.counts
            exact, error, slot = s.exact[:n], s.error[:n], s.slot[:n]
            seen = _compare(x[start : start + n], line, s.limit, exact, error, slot, counts)
            if seen[0] >= INF:
                _widen(x[start : start + n], exact)
                counts[NONFINITE] += _leave_out(exact, line)
                seen = _compare(exact, line, s.limit, exact, error, slot, counts)
            if seen[1] < _SLOTS and n % 2 == 0:
                _count(slot, s.pairs)
            else:
                _count_each(exact, error, s.bins)
            signal += _squares(s.exact, n)
            noise += _squares(s.error, n)
        sums[2 * tile] = signal
        sums[2 * tile + 1] = noise
