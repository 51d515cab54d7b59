# mypy: ignore-errors
"""Quantized matrices as bfloat16, each two neighbours along the contraction side by side.

So does an instruction that multiplies bfloat16 read them. An element times the power of two (or
UE4M3) that is its block's scale has few enough bits that bfloat16 holds it exactly; what it does
not hold, or what the instruction takes for zero, is told.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...jit import compiled, inlined, spliced
from ...rounding import FP32_ONE
from . import decoding
from .arith import MIN_NORMAL
from .intrinsics import as_bits, as_float, shr, transpose16

WIDEST = 2048  # columns of a tile
SQUARE = 16  # rows and columns that are transposed at once


class Panels(NamedTuple):
    """Where a pair lies: rows are cut into panels of ``width``, each of ``size`` pairs."""

    width: int
    size: int
    row_step: int
    pair_step: int


class Scratch(NamedTuple):
    """Memory for what the passes over a line leave to each other."""

    decoding: decoding.Scratch
    even: np.ndarray  # fp32 bits (int32) of a line, and of the one below
    odd: np.ndarray
    pairs: np.ndarray  # of a tile of columns (int32)


def make_scratch(room: int = 0) -> Scratch:
    return Scratch(
        decoding.make_scratch(WIDEST), *np.empty((2, WIDEST), np.int32), np.empty(room, np.int32)
    )


@compiled
def _unfit(line):
    """Whether bfloat16 lacks one of these numbers (fp32 bits), or has it as a subnormal."""
    found = np.int32(0)
    for c in range(line.size):
        magnitude = np.int32(line[c] & np.int32(0x7FFFFFFF))
        subnormal = (magnitude > 0) & (magnitude < np.int32(MIN_NORMAL))
        found |= np.int32(np.int32(magnitude & np.int32(0xFFFF)) | np.int32(subnormal))
    return found != 0


@inlined
def _joined(even, odd):
    """A pair, of fp32 bits."""
    return np.int32(shr(even, np.int32(16)) | np.int32(odd & np.int32(-65536)))


@compiled
def _decode_lines(even, odd, scale, spec, out):
    """Write the pairs of two lines of codes of 8 bits, as ``decoding.decode_line`` decodes them
    where nothing is special, and return the largest code."""
    largest, below = np.int32(0), np.int32(0)
    for c in range(out.size):
        a, b = np.int32(even[c]), np.int32(odd[c])
        largest = max(largest, np.int32(a & np.int32(127)))
        below = max(below, np.int32(b & np.int32(127)))
        first, second = decoding.element(a, spec), decoding.element(b, spec)
        out[c] = _joined(as_bits(as_float(first) * scale[c]), as_bits(as_float(second) * scale[c]))
    return max(largest, below)


@compiled
def _join(even, odd, out):
    for c in range(out.size):
        out[c] = _joined(even[c], odd[c])


@compiled
def _copy(line, out):
    for c in range(out.size):
        out[c] = line[c]


@spliced
def pair_row_tiles(
    data, scale8, scale32, out, geometry, spec, values, scales, least, scratch, first, last
):
    """Tiles of a matrix whose lines are the contraction; whether one of its numbers is unfit.

    ``out`` (uint16) has lines of a multiple of two; the rest is as of ``dequantize_tiles``.
    """
    g, unfit = geometry, False
    size, even = g.block_columns, g.columns + g.columns % 2
    scale_columns = -(-g.columns // size)
    for tile in range(first, last):
        row, left = tile // g.segments, tile % g.segments * g.width
        n = min(g.width, g.columns - left)
        at = row * scale_columns + left // size
        marks = decoding.spread_scales(
            scale8, scale32, scales, at, n, size, least, scratch.decoding
        )
        start, to = (row * g.data_columns + left) * spec.bits // 8, row * even + left
        decoding.decode_line(
            data[start:], n, spec, values, size, FP32_ONE, least, marks, scratch.decoding,
            out[to : to + n],
        )  # fmt: skip
        if left + n < even and left + n == g.columns:
            out[to + n] = 0
        if marks[0]:  # of a tiny scale: in fp32, which lacks none
            decoding.decode_line(
                data[start:], n, spec, values, size, FP32_ONE, least, marks, scratch.decoding,
                scratch.even[:n],
            )  # fmt: skip
            unfit |= _unfit(scratch.even[:n])
    return unfit


@spliced
def interleave_rows(pairs, out, rows, columns, width, first, last):
    """Of pairs (rows, columns), int32, panels ``first`` to ``last``, transposed."""
    for panel in range(first, last):
        for top in range(panel * width, min((panel + 1) * width, rows), SQUARE):
            to = panel * width * columns + top % width
            whole = columns // SQUARE * SQUARE if top + SQUARE <= rows else 0
            for left in range(0, whole, SQUARE):
                transpose16(pairs, top * columns + left, columns, out, to + left * width, width)
            for row in range(top, min(top + SQUARE, rows)):
                for c in range(whole, columns):
                    out[to + row - top + c * width] = pairs[row * columns + c]


@spliced
def pair_column_tiles(
    data, scale8, scale32, out, geometry, spec, values, scales, least, panels, scratch, first, last
):
    """The same of a matrix whose columns are the contraction; ``out`` (int32) lies in ``panels``,
    interleaved."""
    g, p, unfit = geometry, panels, False
    even, odd = scratch.even, scratch.odd
    for tile in range(first, last):
        top, left = tile // g.segments * g.block_rows, tile % g.segments * g.width
        n = min(g.width, g.columns - left)
        at = tile // g.segments * g.columns + left
        marks = decoding.spread_scales(scale8, scale32, scales, at, n, 1, least, scratch.decoding)
        for r in range(top, min(top + g.block_rows, g.rows), 2):
            start = r * g.data_columns + left
            below = start + g.data_columns
            at = (r - top) // 2 * n
            line, largest = scratch.pairs[at : at + n], np.int32(255)
            if r + 1 < g.rows and not (marks[0] or marks[1]):
                largest = _decode_lines(
                    data[start : start + n], data[below : below + n], scratch.decoding.scale, spec,
                    line,
                )  # fmt: skip
            if largest > spec.max_code:
                decoding.decode_line(
                    data[start:], n, spec, values, 1, FP32_ONE, least, marks, scratch.decoding,
                    even[:n],
                )  # fmt: skip
                if r + 1 < g.rows:
                    decoding.decode_line(
                        data[below:], n, spec, values, 1, FP32_ONE, least, marks,
                        scratch.decoding, odd[:n],
                    )  # fmt: skip
                else:
                    for c in range(n):
                        odd[c] = 0
                if marks[0]:
                    unfit |= _unfit(even[:n]) | _unfit(odd[:n])
                _join(even, odd, line)
        c, count = 0, (min(g.block_rows, g.rows - top) + 1) // 2
        while c < n:
            inside = (left + c) % p.width
            wide = min(p.width - inside, n - c)
            to = (left + c) // p.width * p.size + inside + top // 2 * p.pair_step
            for i in range(count):
                line = scratch.pairs[i * n + c : i * n + c + wide]
                _copy(line, out[to + i * p.pair_step : to + i * p.pair_step + wide])
            c += wide
    return unfit
