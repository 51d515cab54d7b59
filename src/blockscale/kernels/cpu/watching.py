# mypy: ignore-errors
"""What a watch tells of a quantized matrix, in one pass over scales and some picked blocks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...jit import compiled, spliced
from ..common.watch_vector import (
    AMAX,
    CODES,
    CODES_AT,
    ELEMENT,
    FIRST_BLOCK,
    LENGTH,
    OCTAVES,
    OCTAVES_AT,
    SUMS_AT,
    VALUE,
)
from .arith import INF, fp32, magnitude
from .intrinsics import as_bits, as_float, shr

__all__ = ["WIDTH", "Shape"]

_MASK = 0x7FFFFFFF
#: Counts of codes and of octaves, four times: neighbours in one need not wait for each other.
WIDTH = CODES + OCTAVES


class Shape(NamedTuple):
    """Sizes and strides of a matrix of lines, along which blocks run. Strides are in items, those
    of data in bytes."""

    lines: int
    k: int
    x_line: int
    x_along: int
    data_line: int
    data_along: int
    scale_line: int
    scale_block: int
    height: int
    size: int
    stored: int  # bytes of a block's elements in a line
    nan_code: int
    by_columns: bool  # compact scales are counted so


@compiled
def _count(scale8, scale32, counts):
    """Count how often each code occurs."""
    for i in range(scale8.size):
        counts[(i & 3) * WIDTH + scale8[i]] += 1
    for i in range(scale32.size):
        counts[(i & 3) * WIDTH + _exponent(scale32[i])] += 1


@compiled
def _exponent(bits):
    return np.int64(shr(bits, np.int32(23)) & np.int32(255))


@compiled
def _first(scale8, scale32, nan_code):
    """The first scale that is no number."""
    for i in range(scale8.size):
        if scale8[i] == nan_code:
            return i
    for i in range(scale32.size):
        if _exponent(scale32[i]) == nan_code:
            return i
    return -1


@compiled
def _largest(x):
    """As fp32 bits."""
    most = magnitude(x[0])
    for i in range(1, x.size):
        most = max(most, magnitude(x[i]))
    return fp32(most)


@compiled
def _octave(m, exponent, mantissa, largest):
    """How many powers of two a magnitude lies below the largest of its block, whose exponent and
    mantissa these are."""
    own = np.int32(shr(m, np.int32(23)))
    if own == 0 or exponent == 0:  # subnormal
        ratio = as_bits(as_float(m) / as_float(largest))
        return np.int32(127 - shr(ratio, np.int32(23)))
    return np.int32(exponent - own + np.int32((m & np.int32(0x7FFFFF)) < mantissa))


@compiled
def _code(data, at, along, i, stored, size):
    """Return the code of element ``i`` of a block, whose bytes begin at ``at``."""
    if stored == size:
        return np.int32(data[at + i * along])
    return np.int32((data[at + (i >> 1) * along] >> ((i & 1) * 4)) & 15)


@compiled
def _compare(given, place, s, decoded, found):
    """Add up what a finite block is, whose ``decoded`` codes of elements are to be multiplied by
    the scale and the global scale."""
    (x, data), (line, block), (values, scale, factor, top), (out, counts) = (
        given,
        place,
        decoded,
        found,
    )
    n = min(s.size, s.k - block * s.size)
    start = line * s.x_line + block * s.size * s.x_along
    at = line * s.data_line + block * s.stored * s.data_along
    limit = np.float32(np.float32(scale * top) * factor)
    signal, noise = 0.0, 0.0
    zeros, became, saturated, most = 0, 0, 0, np.int32(0)
    for i in range(n):
        bits = fp32(x[start + i * s.x_along])
        m = np.int32(bits & np.int32(_MASK))
        exact = as_float(bits)
        code = _code(data, at, s.data_along, i, s.stored, s.size)
        value = np.float32(np.float32(as_float(values[code]) * scale) * factor)
        error = np.float32(value - exact)
        signal += np.float64(exact) * np.float64(exact)
        noise += np.float64(error) * np.float64(error)
        zeros += m == 0
        became += value == 0
        saturated += as_float(m) > limit
        most = max(most, m)
    flushed = np.float64(became - zeros)
    sums = np.float64(n), signal, noise, np.float64(zeros), flushed, np.float64(saturated)
    for j in range(len(sums)):
        out[SUMS_AT + j] += sums[j]
    exponent, mantissa = np.int32(shr(most, np.int32(23))), np.int32(most & np.int32(0x7FFFFF))
    for i in range(n):
        m = np.int32(fp32(x[start + i * s.x_along]) & np.int32(_MASK))
        if m > 0:
            octave = min(max(_octave(m, exponent, mantissa, most), 0), OCTAVES - 1)
            counts[(i & 3) * WIDTH + CODES + octave] += 1


@compiled
def _find(x, first, s, out):
    """The first element of a block that is not finite."""
    across, down = -(-s.k // s.size), -(-s.lines // s.height)
    line, block = first // across, first % across
    if s.by_columns:
        line, block = first % down, first // down
    out[ELEMENT] = s.height * s.size
    for i in range(s.height * s.size - 1, -1, -1):
        row, column = line * s.height + i // s.size, block * s.size + i % s.size
        if row < s.lines and column < s.k:
            bits = fp32(x[row * s.x_line + column * s.x_along])
            if (bits & _MASK) >= INF:
                out[ELEMENT] = i
                out[VALUE] = as_float(bits)


@spliced
def watch_lines(x, data, scale, shape, places, constants, factor, found):
    """Write a vector, zeros before, as are the counts (4 times ``WIDTH``) beside it.

    ``x`` is empty where nobody has it. Of the ``scale`` of one byte and of fp32, one is empty.
    ``places``: picked blocks, counted along lines. ``constants``: fp32 bits of codes of elements,
    those of codes of scales, and what a block of scale 1 can hold. ``factor``: fp32 bits of the
    global scale.
    """
    s, (scale8, scale32), (values, scales, top), (out, counts) = shape, scale, constants, found
    _count(scale8, scale32, counts)
    for i in range(CODES):
        out[CODES_AT + i] = (
            counts[i] + counts[WIDTH + i] + counts[2 * WIDTH + i] + counts[3 * WIDTH + i]
        )
    first = _first(scale8, scale32, s.nan_code) if out[CODES_AT + s.nan_code] > 0 else -1
    out[FIRST_BLOCK] = first
    if x.size == 0:
        out[AMAX] = np.nan
        for i in range(SUMS_AT, LENGTH):
            out[i] = np.nan
        return
    out[AMAX] = as_float(_largest(x))
    across = -(-s.k // s.size)
    scalar = as_float(np.int32(factor))
    for p in range(places.size):
        line, block = places[p] // across, places[p] % across
        at = (line // s.height) * s.scale_line + block * s.scale_block
        if scale8.size:
            bits, code = scales[scale8[at]], np.int64(scale8[at])
        else:
            bits, code = scale32[at], _exponent(scale32[at])
        if code != s.nan_code:
            decoded = values, as_float(np.int32(bits)), scalar, top
            _compare((x, data), (line, block), s, decoded, found)
    for i in range(CODES, WIDTH):
        total = counts[i] + counts[WIDTH + i] + counts[2 * WIDTH + i] + counts[3 * WIDTH + i]
        out[OCTAVES_AT - CODES + i] = total
    if first >= 0:
        _find(x, first, s, out)
