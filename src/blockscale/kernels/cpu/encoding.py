# mypy: ignore-errors
"""Quantize, tile by tile.

Memory is seen as (leads, rows, columns) with the columns contiguous; ``axis=-2`` only turns a
format's block over, to (block_size, 1). A tile is one strip of blocks by ``width`` columns and goes
through the level-1 cache in passes, each a plain loop that LLVM turns into vector code.

The passes use fp32 arithmetic where operands and results are normal numbers, or zero, or too small
to change a byte, so that flush-to-zero does not matter. Blocks for which that is not so (tiny ones,
and those with a NaN or an infinity) are then done again by :func:`_exact_block`, in integers, step
for step as ``rounding.py`` defines it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from ...jit import OPTIONS, compiled, spliced
from ..common.spec import NEAREST_FP32, POWER_OF_TWO, Spec
from . import stochastic
from .arith import (
    INF,
    MIN_NORMAL,
    ONE,
    encode,
    exact_divide,
    exact_encode,
    exact_multiply,
    fp32,
    magnitude,
)
from .intrinsics import amax16, amax32, as_bits, as_float, fill16, shl, shr
from .packing import pack, pack_columns
from .spec import Geometry

SMALL = (127 - 100) << 23  # 2^-100: far from the subnormals, and so are its products with elements
LARGE = (127 + 100) << 23
_LARGE_STOCHASTIC = (127 + 64) << 23  # times a subnormal: below 2^-32 of any element's quantum
_E4M3 = np.int64(3), np.int64(7), np.int64(0x7E)  # mantissa bits, bias, largest code


@compiled
def pad(source, columns, n, out):
    """Copy a strip, each row padded with zeros to ``n`` items."""
    x, start, stride, rows = source
    # a loop: numba takes two seconds to compile an assignment to a slice
    for r in range(rows):
        for c in range(n):
            out[r * n + c] = x[start + r * stride + c] if c < columns else 0


@compiled
def _zero(line):
    for c in range(line.size):
        line[c] = 0


@compiled
def _column_amax(row, amax):
    for c in range(row.size):
        amax[c] = max(amax[c], magnitude(row[c]))


@compiled
def block_amax(row, size, amax):
    if size % 32:
        for b in range(amax.size):
            m = amax16(row, b * size)
            for i in range(b * size + 16, b * size + size, 16):
                m = max(m, amax16(row, i))
            amax[b] = fp32(m)
        return
    for b in range(amax.size):
        m = amax32(row, b * size)
        for i in range(b * size + 32, b * size + size, 32):
            m = max(m, amax32(row, i))
        amax[b] = fp32(m)


@compiled
def _amax(source, height, size, columns, amax):
    """fp32 bits of the largest magnitudes in a strip's blocks.

    ``columns`` is room for those of the strip's columns, as items of x.
    """
    x, start, stride, rows = source
    if height == 1:
        block_amax(x[start : start + columns.size], size, amax)
        return
    _zero(columns)
    for r in range(rows):
        at = start + r * stride
        _column_amax(x[at : at + columns.size], columns)
    if size > 1:
        block_amax(columns, size, amax)
    else:
        for c in range(columns.size):
            amax[c] = fp32(columns[c])


@compiled
def _power_of_two_scales(amax, spec, code, reciprocal):
    limit, exponent = np.int32(spec.limit), np.int32(spec.max_exponent)
    lowest, shift = np.int32(spec.min_byte), np.int32(spec.shift)
    for b in range(amax.size):
        m = amax[b]
        up = np.int32(np.int32(m & np.int32(0x7FFFFF)) > limit)
        byte = max(np.int32(shr(m, np.int32(23)) - exponent + up), lowest)
        code[b] = shl(byte, shift)
        reciprocal[b] = shl(np.int32(np.int32(254) - byte), np.int32(23))


@compiled
def _fp32_scales(amax, spec, code, reciprocal):
    largest = as_float(np.int32(spec.max_bits))
    for b in range(amax.size):
        bits = max(as_bits(as_float(amax[b]) / largest), np.int32(MIN_NORMAL))
        code[b] = bits
        reciprocal[b] = as_bits(np.float32(1) / as_float(bits))


@compiled
def ue4m3_scales(amax, encode_scale, table, code, reciprocal):
    factor = as_float(np.int32(encode_scale))
    lowest, shift, top = np.int32((127 - 6) << 23), np.int32(20), np.int32(0x43E00000)  # of E4M3
    for b in range(amax.size):
        code[b] = encode(amax[b], factor, lowest, shift, top)
    for b in range(amax.size):
        reciprocal[b] = table[code[b] & 127]


@compiled
def mark_inexact(amax, small, reciprocal, largest, inexact):
    """Mark blocks that fp32 arithmetic may get wrong; the result tells whether there are any."""
    found = np.uint8(0)
    for b in range(amax.size):
        m, r = amax[b], reciprocal[b]
        large = r >= largest  # subnormal elements count (reciprocals never are)
        is_inexact = (m >= np.int32(INF)) | ((m > 0) & ((m < small) | large))
        inexact[b] = np.uint8(is_inexact)
        found |= inexact[b]
    return found


@compiled
def _scales(amax, spec, encode_scale, table, largest, code, reciprocal, inexact):
    """Scale codes and fp32 bits of reciprocals; marks inexact blocks, tells whether there are."""
    if spec.kind == POWER_OF_TWO:
        _power_of_two_scales(amax, spec, code, reciprocal)
    elif spec.kind == NEAREST_FP32:
        _fp32_scales(amax, spec, code, reciprocal)
    else:
        ue4m3_scales(amax, encode_scale, table, code, reciprocal)
    small = np.int32(SMALL if encode_scale >= SMALL else INF)
    return mark_inexact(amax, small, reciprocal, largest, inexact)


@compiled
def spread(blocks, size, columns):
    for b in range(columns.size // size):
        for i in range(b * size, b * size + size, 16):
            fill16(columns, i, blocks[b])


# How a row and how a number are rounded is said by the type of the seed, None or its value and
# step: what is not asked for is not compiled. ``random`` is the seed, the index of a strip's first
# element, how far rows are apart, and room for random bits.


def _encode_row(row, reciprocal, out, spec, random, r):
    """Codes of row ``r`` of a strip."""


@overload(_encode_row, jit_options=OPTIONS)
def _rounded_row(row, reciprocal, out, spec, random, r):
    if random[0] == types.none:
        return _nearest_row
    return _stochastic_row


def _nearest_row(row, reciprocal, out, spec, random, r):
    lowest, shift = np.int32((128 - spec.bias) << 23), np.int32(23 - spec.mantissa_bits)
    top, sign = np.int32(spec.max_bits), np.int32(1 << (spec.bits - 1))
    down = np.int32(32 - spec.bits)
    for c in range(out.size):
        v = fp32(row[c])
        code = encode(
            np.int32(v & np.int32(0x7FFFFFFF)), as_float(reciprocal[c]), lowest, shift, top
        )
        out[c] = np.uint8(np.int32(code | np.int32(shr(v, down) & sign)))


def _stochastic_row(row, reciprocal, out, spec, random, r):
    seed, first, row_length, noise = random
    drawn = stochastic.draw(seed, first + r * row_length, row.size, noise)
    stochastic.encode_row(row, reciprocal, noise[drawn : drawn + row.size], out, spec)


def _exact_code(magnitude, spec, random, r, c):
    """Code of the element in row ``r`` and column ``c`` of a strip."""


@overload(_exact_code, jit_options=OPTIONS)
def _rounded_code(magnitude, spec, random, r, c):
    if random[0] == types.none:
        return lambda magnitude, spec, random, r, c: exact_encode(
            magnitude, spec.mantissa_bits, spec.bias, spec.max_code
        )
    return _stochastic_code


def _stochastic_code(magnitude, spec, random, r, c):
    seed, first, row_length, noise = random
    drawn = stochastic.draw(seed, first + r * row_length + c, 1, noise)
    return stochastic.exact_encode(
        magnitude, spec.mantissa_bits, spec.bias, spec.max_code, noise[drawn]
    )


@compiled
def _encode(source, target, n, reciprocal, spec, random):
    """Codes of a strip, ``n`` columns of it; rows that are padding become zeros."""
    x, start, stride, rows = source
    out, to, out_stride, out_rows, out_columns = target
    for r in range(out_rows):
        at = to + r * out_stride
        line = out[at : at + out_columns]
        if r < rows:
            at = start + r * stride
            _encode_row(x[at : at + n], reciprocal, line, spec, random, r)
        else:
            _zero(line)


@compiled
def _store_scales(code, scale8, scale32, at):
    if scale8.size:
        for b in range(code.size):
            scale8[at + b] = np.uint8(code[b])
    else:
        for b in range(code.size):
            scale32[at + b] = code[b]


@compiled
def _exact_scale(amax, spec, encode_scale, table):
    """``rounding.block_scale`` of one block: the code and the bits of the reciprocal."""
    if spec.kind == POWER_OF_TWO:
        up = 1 if (amax & 0x7FFFFF) > spec.limit else 0
        byte = min(max((amax >> 23) - spec.max_exponent + up, spec.min_byte), 254)
        return byte << spec.shift, (254 - byte) << 23 if byte < 254 else 0x00400000
    if spec.kind == NEAREST_FP32:
        bits = max(exact_divide(amax, spec.max_bits), MIN_NORMAL)
        return bits, exact_divide(np.int64(ONE), bits)
    code = exact_encode(exact_multiply(amax, encode_scale), *_E4M3)
    return code, np.int64(table[code])


@compiled
def _exact_block(source, target, left, columns, spec, encode_scale, table, random):
    """Quantize the block that begins in column ``left`` and return the code of its scale."""
    x, start, stride, rows = source
    out, to, out_stride, out_rows, out_columns = target
    start, to, out_columns = start + left, to + left, min(columns, out_columns - left)
    amax, nan, inf = np.int64(0), False, False
    for r in range(rows):
        for c in range(columns):
            m = np.int64(fp32(x[start + r * stride + c])) & 0x7FFFFFFF
            nan, inf = nan or m > INF, inf or m == INF
            amax = max(amax, m if m < INF else np.int64(0))
    scale, reciprocal = _exact_scale(amax, spec, encode_scale, table)
    if nan or inf:
        if spec.propagate:
            scale = spec.scale_nan
        elif inf:
            scale = spec.scale_max
    for r in range(out_rows):
        for c in range(out_columns):
            v = np.int64(0)
            if r < rows:
                v = np.int64(fp32(x[start + r * stride + c]))
            m, sign = v & 0x7FFFFFFF, ((v >> 31) & 1) << (spec.bits - 1)
            if spec.propagate and (nan or inf):
                code = spec.block_nan_code
            elif m > INF:
                code = spec.nan_code
            elif m == INF:
                code = spec.max_code | sign
            elif inf:
                code = 0
            else:
                code = _exact_code(exact_multiply(m, reciprocal), spec, random, r, left + c) | sign
            out[to + r * out_stride + c] = code
    return scale


class Scratch(NamedTuple):
    """Memory for what the passes over a tile leave to each other."""

    padded: np.ndarray  # these two hold items of x
    column_amax: np.ndarray
    amax: np.ndarray  # int32, as the next three
    code: np.ndarray
    reciprocal: np.ndarray
    spread: np.ndarray
    noise: np.ndarray  # random bits of a row; empty where elements are rounded to nearest
    inexact: np.ndarray  # uint8, as the rest
    codes: np.ndarray
    transposed: np.ndarray
    packed: np.ndarray


def make_scratch(x: np.ndarray, geometry: Geometry, spec: Spec, stochastically: bool) -> Scratch:
    width, strip = geometry.width, geometry.block_rows * geometry.width
    padded = strip if geometry.columns % geometry.block_columns else 0
    codes = strip * geometry.depth if spec.bits < 8 else 0
    transposed = codes if geometry.transposed else 0
    return Scratch(
        np.empty(padded, x.dtype),
        np.empty(width, x.dtype),
        *np.empty((4, width), np.int32),
        np.empty(width + stochastic.ROOM if stochastically else 0, np.int32),
        np.empty(width, np.uint8),
        np.empty(codes, np.uint8),
        *np.empty((2, transposed), np.uint8),
    )


@spliced
def quantize_tiles(
    x, data, scale8, scale32, geometry, spec, encode_scale, table, seed, place, scratch, first, last
):
    """Quantize tiles ``first`` to ``last`` of a tensor.

    ``x`` (uint16, int16 or int32), ``data`` (uint8) and one of ``scale8`` (uint8) and ``scale32``
    (int32) are flat and contiguous in memory; the other scale is empty. ``table`` and
    ``encode_scale`` come from :func:`ue4m3_reciprocals`, ``scratch`` from :func:`make_scratch`.
    Elements are rounded to nearest where ``seed`` is None, else stochastically; ``place``: the
    index of the first one, and how far rows and matrices are apart, as in ``seed.Numbers``.
    """
    g = geometry
    largest = np.int32(_LARGE_STOCHASTIC if scratch.noise.size else LARGE)
    height, size, width = g.block_rows, g.block_columns, g.width
    groups, scale_columns = -(-g.strips // g.depth), -(-g.columns // size)
    for tile in range(first, last):
        lead = tile // (groups * g.segments)
        first_strip = tile // g.segments % groups * g.depth
        strips = min(g.depth, g.strips - first_strip)
        left = tile % g.segments * width
        columns = min(width, g.columns - left)
        n = -(-columns // size) * size
        blocks = n // size
        for strip in range(first_strip, first_strip + strips):
            top = strip * height
            rows, out_rows = min(height, g.rows - top), min(height, g.data_rows - top)
            out_columns = min(n, g.data_columns - left)

            start, stride = lead * g.lead_stride + top * g.row_stride + left, g.row_stride
            source = x, start, stride, rows
            if columns < n:
                pad(source, columns, n, scratch.padded)
                source = scratch.padded, 0, n, rows
            to = (lead * g.data_rows + top) * g.data_columns + left
            target = data, to, g.data_columns, out_rows, out_columns
            if spec.bits < 8:
                to = (strip - first_strip) * height * width
                target = scratch.codes, to, width, out_rows, out_columns
            index = place[0] + lead * place[2] + top * place[1] + left
            random = seed, index, place[1], scratch.noise

            _amax(source, height, size, scratch.column_amax[:n], scratch.amax[:blocks])
            found_inexact = _scales(
                scratch.amax[:blocks], spec, encode_scale, table, largest, scratch.code,
                scratch.reciprocal, scratch.inexact,
            )  # fmt: skip
            factor = scratch.reciprocal
            if size > 1:
                factor = scratch.spread
                spread(scratch.reciprocal, size, factor[:n])
            _encode(source, target, n, factor, spec, random)
            if found_inexact:
                for b in range(blocks):
                    if scratch.inexact[b]:
                        scratch.code[b] = _exact_block(
                            source, target, b * size, size, spec, encode_scale, table, random
                        )

            at = (lead * g.strips + strip) * scale_columns + left // size
            _store_scales(scratch.code[:blocks], scale8, scale32, at)
            if spec.bits < 8 and not g.transposed:
                for r in range(out_rows):
                    at = ((lead * g.data_rows + top + r) * g.data_columns + left) * spec.bits // 8
                    pack(scratch.codes[r * width : r * width + n], spec.bits, data[at:])

        if g.transposed:
            line_length = g.data_rows * spec.bits // 8
            at = (lead * g.columns + left) * line_length + first_strip * height * spec.bits // 8
            pack_columns(
                scratch.codes, strips * height, columns, width, spec.bits, scratch.transposed,
                scratch.packed, data, at, line_length,
            )  # fmt: skip


@spliced
def amax_tiles(x, geometry, limit, amax, first, last):
    """fp32 bits of the largest finite magnitude in tiles ``first`` to ``last`` of ``x``.

    ``limit`` is the largest finite item, ``amax`` zeros for one tile.
    """
    g = geometry
    zero = amax[0]
    for tile in range(first, last):
        row, left = tile // g.segments, tile % g.segments * g.width
        start = row // g.rows * g.lead_stride + row % g.rows * g.row_stride + left
        n = min(g.width, g.columns - left)
        row = x[start : start + n]
        for c in range(n):
            m = magnitude(row[c])
            amax[c] = max(amax[c], m if m <= limit else zero)
    for m in amax:
        zero = max(zero, m)
    return fp32(zero)
