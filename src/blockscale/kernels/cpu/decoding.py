# mypy: ignore-errors
"""Dequantize, tile by tile: see encoding.py for the tiles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...jit import compiled, inlined, spliced
from .arith import INF, exact_multiply, store
from .intrinsics import as_bits, as_float, fill16, shl
from .packing import unpack


class Scratch(NamedTuple):
    """Memory for what the passes over a tile leave to each other."""

    codes: np.ndarray
    scale: np.ndarray  # one a column
    scale_bits: np.ndarray  # one a block


def make_scratch(width: int) -> Scratch:
    return Scratch(
        np.empty(width, np.uint8), np.empty(width, np.float32), np.empty(width, np.int32)
    )


@inlined
def element(code, spec):
    """fp32 bits of a code (int32), unscaled; without NaN and infinities."""
    sign = np.int32(1 << (spec.bits - 1))
    magnitude, first_normal = np.int32(code & np.int32(sign - 1)), np.int32(1 << spec.mantissa_bits)
    bias = np.int32((127 - spec.bias) << 23)
    normal = np.int32(shl(magnitude, np.int32(23 - spec.mantissa_bits)) + bias)
    step = as_float(np.int32((128 - spec.bias - spec.mantissa_bits) << 23))
    subnormal = as_bits(np.float32(magnitude) * step)
    value = np.int32(normal if magnitude >= first_normal else subnormal)
    return np.int32(value | shl(np.int32(code & sign), np.int32(32 - spec.bits)))


@compiled
def _decode_row(codes, scale, global_scale, spec, out):
    """Write a line of values and return its largest code."""
    mask, largest = np.int32((1 << (spec.bits - 1)) - 1), np.int32(0)
    for c in range(out.size):
        code = np.int32(codes[c])
        largest = max(largest, np.int32(code & mask))
        store(out, c, as_bits(as_float(element(code, spec)) * scale[c] * global_scale))
    return largest


@compiled
def spread_scales(scale8, scale32, scales, at, n, size, least, scratch):
    """Scales of ``n`` columns, from block ``at`` on; whether some are tiny, or not finite."""
    bits = scratch.scale_bits[: -(-n // size)]
    if scale8.size:
        codes = scale8[at : at + bits.size]
        for b in range(bits.size):
            bits[b] = scales[codes[b]]
    else:
        given = scale32[at : at + bits.size]
        for b in range(bits.size):
            bits[b] = given[b]
    tiny, nonfinite = np.int32(0), np.int32(0)
    for b in range(bits.size):
        m = np.int32(bits[b] & np.int32(0x7FFFFFFF))
        tiny |= np.int32((m > 0) & (m < np.int32(least)))
        nonfinite |= np.int32(m >= np.int32(INF))
    if size == 1:
        for c in range(bits.size):
            scratch.scale[c] = as_float(bits[c])
    elif size == 32:
        for b in range(bits.size):
            fill16(scratch.scale, 32 * b, as_float(bits[b]))
            fill16(scratch.scale, 32 * b + 16, as_float(bits[b]))
    else:
        for b in range(bits.size):
            for i in range(b * size, b * size + size, 16):
                fill16(scratch.scale, i, as_float(bits[b]))
    return tiny != 0, nonfinite != 0


@compiled
def decode_line(data, n, spec, values, size, global_scale, least, marks, scratch, line):
    """Values of ``n`` elements; ``marks`` come from :func:`spread_scales`."""
    tiny, nonfinite = marks
    codes = data[:n]
    if spec.bits < 8:
        unpack(data, spec.bits, n, scratch.codes)
        codes = scratch.codes[:n]
    largest = _decode_row(codes, scratch.scale, as_float(np.int32(global_scale)), spec, line)
    special = largest > spec.max_code
    if special or nonfinite or (tiny and largest > 0):
        _exact_row(
            codes, scratch.scale_bits, size, global_scale, spec, values, least, special, line
        )


@spliced
def dequantize_tiles(
    data, scale8, scale32, out, geometry, spec, values, scales, global_scale, least, scratch,
    first, last,
):  # fmt: skip
    """Values of tiles ``first`` to ``last``, into ``out`` (int32: float32, uint16: bfloat16).

    ``values`` and ``scales`` hold the fp32 bits (int32) of every element and one-byte scale code;
    ``scale32`` holds such bits already. With a scale below ``least`` (or not finite) products may
    be subnormal: those blocks, and NaN or infinite elements, are multiplied exactly.
    """
    g = geometry
    size, width = g.block_columns, g.width
    scale_columns = -(-g.columns // size)
    for tile in range(first, last):
        lead, strip = tile // (g.strips * g.segments), tile // g.segments % g.strips
        top, left = strip * g.block_rows, tile % g.segments * width
        n = min(width, g.columns - left)
        at = (lead * g.strips + strip) * scale_columns + left // size
        marks = spread_scales(scale8, scale32, scales, at, n, size, least, scratch)
        for r in range(min(g.block_rows, g.rows - top)):
            start = ((lead * g.data_rows + top + r) * g.data_columns + left) * spec.bits // 8
            to = lead * g.lead_stride + (top + r) * g.row_stride + left
            decode_line(
                data[start:], n, spec, values, size, global_scale, least, marks, scratch,
                out[to : to + n],
            )  # fmt: skip


@compiled
def _exact_row(codes, bits, size, global_scale, spec, values, least, special, out):
    """Do the elements again whose products may not be exact in fp32 arithmetic.

    A zero is exact whatever the scale: blocks of zeros, whose scale is tiny, are common.
    """
    mask = (1 << (spec.bits - 1)) - 1
    for b in range(-(-out.size // size)):
        s = np.int64(bits[b]) & 0xFFFFFFFF
        m = s & 0x7FFFFFFF
        tiny, nonfinite = m > 0 and m < least, m >= INF
        if tiny or nonfinite or special:
            for c in range(b * size, min(b * size + size, out.size)):
                magnitude = codes[c] & mask
                if nonfinite or (tiny and magnitude > 0) or magnitude > spec.max_code:
                    product = exact_multiply(np.int64(values[codes[c]]) & 0xFFFFFFFF, s)
                    store(out, c, np.int32(exact_multiply(product, global_scale)))
