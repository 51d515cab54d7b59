"""The compiled loops: exact integer arithmetic, quantize, dequantize and amax, over tiles.

Memory is seen as (leads, rows, columns) with the columns contiguous; ``axis=-2`` only turns a
format's block over, to (block_size, 1). A tile is one strip of blocks by ``width`` columns and goes
through the level-1 cache in passes, each a plain loop that LLVM turns into vector code.

Blocks are quantized by fp32 arithmetic whose operands and results are normal numbers, or zero, or
too small to change a byte, so that flush-to-zero cannot matter. The blocks for which that is not so
(tiny ones, and those with a NaN or an infinity) are then done again by :func:`_exact_block`, in
integers, step for step as ``rounding.py`` defines it.

numba's cache watches only the file of a compiled function, so all of it is in this one. numba also
widens int32 arithmetic to int64: hence the casts, which halve the vectors' work.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

__all__ = ["Geometry", "Spec", "amax_tiles", "dequantize_tiles", "quantize_tiles", "ue4m3_reciprocals"]

_INF = 0x7F800000
_NAN = 0x7FC00000
_MAX = 0x7F7FFFFF
_SMALL = (127 - 100) << 23  # 2^-100: far from the subnormals, products of it with an element too
_LARGE = (127 + 100) << 23
_POWER_OF_TWO, _NEAREST_FP32, _NEAREST_UE4M3 = 0, 1, 2


class Spec(NamedTuple):
    """A format, a scale rounding and a policy for NaN, as the integers that the loops need."""

    # the element
    mantissa_bits: int
    bias: int
    bits: int
    max_code: int
    max_bits: int  # of the largest value, as fp32
    nan_code: int  # of one NaN; the largest code where the element has none
    block_nan_code: int  # of every element of a block with a NaN under "propagate"
    # the scale
    kind: int  # _POWER_OF_TWO, _NEAREST_FP32 or _NEAREST_UE4M3
    limit: int  # largest mantissa of amax that is not rounded up to the next power of two
    max_exponent: int  # of the element
    min_byte: int  # of a power of two
    shift: int  # a power of two is stored as byte << shift
    scale_nan: int
    scale_max: int
    propagate: int


class Geometry(NamedTuple):
    """Shapes and strides of one call, in elements; ``x`` is the unquantized side."""

    rows: int  # of x, in each lead
    columns: int
    lead_stride: int
    row_stride: int
    data_rows: int  # rows and columns of the data: those of x, or more where padded
    data_columns: int
    block_rows: int
    block_columns: int
    strips: int  # in each lead; a row of scales is one strip
    segments: int  # tiles of a strip
    width: int  # columns of a tile
    turned: int  # 1: packed data along axis -2, stored (leads, columns, packed rows)


# --- what numba lacks -----------------------------------------------------------------------------


def _binary(name, result, left, right):
    def typed(context, a, b):
        return result(left, right), lambda _, builder, __, args: getattr(builder, name)(*args)

    return intrinsic(typed)


def _bitcast(result, given, llvm):
    def typed(context, v):
        return result(given), lambda _, builder, __, args: builder.bitcast(args[0], llvm)

    return intrinsic(typed)


_shl = _binary("shl", types.int32, types.int32, types.int32)
_shr = _binary("lshr", types.int32, types.int32, types.int32)
_float = _bitcast(types.float32, types.int32, ir.FloatType())
_bits = _bitcast(types.int32, types.float32, ir.IntType(32))


def _sixteen(context, builder, array_type, array, index):
    """Pointer to 16 items of a contiguous array, as a vector."""
    data = context.make_array(array_type)(context, builder, array).data
    item = data.type.pointee
    pointer = builder.gep(data, [index])
    return builder.bitcast(pointer, ir.VectorType(item, 16).as_pointer()), item


@intrinsic
def _amax16(context, array, index):
    """Largest magnitude of 16 items (integers of 16 or 32 bits, sign on top)."""

    def generate(context, builder, signature, args):
        pointer, item = _sixteen(context, builder, array, *args)
        vector, width = pointer.type.pointee, item.width
        value = builder.load(pointer, align=width // 8)
        value = builder.and_(value, ir.Constant(vector, [(1 << (width - 1)) - 1] * 16))
        name = f"llvm.vector.reduce.umax.v16i{width}"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(item, [vector]), name)
        return builder.call(function, [value])

    return array.dtype(array, types.intp), generate


@intrinsic
def _fill16(context, array, index, value):
    """Store ``value`` in 16 items."""

    def generate(context, builder, signature, args):
        pointer, item = _sixteen(context, builder, array, *args[:2])
        vector = ir.Constant(pointer.type.pointee, ir.Undefined)
        for lane in range(16):
            vector = builder.insert_element(vector, args[2], ir.Constant(ir.IntType(32), lane))
        builder.store(vector, pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), generate


# --- fp32 and narrow floats, as integers ----------------------------------------------------------
# x arrives as int32 (float32), uint16 (bfloat16) or int16 (float16): its type says how to read it.


def _fp32(v):
    """fp32 bits (int32) of an item of x."""


@overload(_fp32)
def _fp32_overload(v):
    if v == types.uint16:
        return lambda v: _shl(np.int32(v), np.int32(16))
    if v == types.int16:
        return _fp32_from_half
    return lambda v: v


def _fp32_from_half(v):
    half = np.int32(v & 0x7FFF)
    normal = _shl(np.int32(half + (112 << 10)), np.int32(13))
    subnormal = _bits(np.float32(half) * np.float32(2.0**-24))
    special = np.int32(_shl(half, np.int32(13)) | _INF)
    magnitude = subnormal if half < 0x400 else (special if half >= 0x7C00 else normal)
    return np.int32(magnitude | (np.int32(v) & np.int32(-0x80000000)))


def _magnitude(v):
    """An item of x without its sign; the order of the numbers is kept."""


@overload(_magnitude)
def _magnitude_overload(v):
    if v == types.uint16:
        return lambda v: np.uint16(v & 0x7FFF)
    if v == types.int16:
        return lambda v: np.int16(v & 0x7FFF)
    return lambda v: np.int32(v & 0x7FFFFFFF)


def _store(out, i, bits):
    """Write fp32 bits as float32 (int32) or, to nearest even, as bfloat16 (uint16)."""


@overload(_store)
def _store_overload(out, i, bits):
    if out.dtype == types.int32:

        def store(out, i, bits):
            out[i] = bits
    else:

        def store(out, i, bits):
            odd = np.int32(_shr(bits, np.int32(16)) & np.int32(1))
            out[i] = np.uint16(_shr(np.int32(bits + np.int32(0x7FFF) + odd), np.int32(16)))

    return store


@njit(forceinline=True)
def _encode(magnitude, reciprocal, lowest, shift, top):
    """Code (int32, sign clear) of fp32 bits ``magnitude`` times ``reciprocal``, saturating.

    ``lowest`` and ``top`` are the bits of the smallest normal and of the largest value, ``shift`` is
    23 - mantissa_bits. Adding 2^shift times the product's binade (at least the lowest one) makes
    fp32 itself round to the element's quantum and leaves the multiple in the low bits.
    """
    product = min(_bits(_float(magnitude) * reciprocal), top)
    binade = max(np.int32(product & np.int32(_INF)), lowest)
    anchor = np.int32(binade + _shl(shift, np.int32(23)))
    multiple = np.int32(_bits(_float(product) + _float(anchor)) - anchor)
    return np.int32(multiple + _shr(np.int32(binade - lowest), shift))


@njit
def _bit_length(n):
    return math.frexp(float(n))[1]


@njit
def _parts(magnitude):
    field = magnitude >> 23
    if field == 0:
        return magnitude, -149
    return (magnitude & 0x7FFFFF) | 0x800000, field - 150


@njit
def _round(significand, exponent, mantissa_bits, bias):
    """``rounding.round_significand`` of one number, to nearest even."""
    if significand == 0:
        return 0
    top = exponent + _bit_length(significand) - 1
    quantum = max(top, 1 - bias) - mantissa_bits
    right = min(max(quantum - exponent, 0), 62)
    left = min(max(exponent - quantum, 0), 52)
    kept = (significand << left) >> right
    dropped, half = significand & ((1 << right) - 1), (1 << right) >> 1
    if dropped > half or (dropped == half and right > 0 and kept & 1 == 1):
        kept += 1
    return kept + ((quantum + mantissa_bits + bias - 1) << mantissa_bits)


@njit
def _exact_multiply(a, b):
    """``rounding.multiply`` of two numbers (fp32 bits, int64)."""
    sign = (a ^ b) & 0x80000000
    a, b = a & 0x7FFFFFFF, b & 0x7FFFFFFF
    if a > _INF or b > _INF or (max(a, b) == _INF and min(a, b) == 0):
        return _NAN
    if a == _INF or b == _INF:
        return _INF | sign
    (sa, ea), (sb, eb) = _parts(a), _parts(b)
    return min(_round(sa * sb, ea + eb, 23, 127), _INF) | sign


@njit
def _exact_divide(a, b):
    """``rounding.divide`` of two numbers, a >= 0 and b > 0."""
    (sa, ea), (sb, eb) = _parts(a), _parts(b)
    la, lb = 24 - _bit_length(sa), 24 - _bit_length(sb)
    sa, sb = sa << la, sb << lb
    quotient = (sa << 26) // sb
    sticky = 1 if quotient * sb != sa << 26 else 0
    return min(_round((quotient << 1) | sticky, (ea - la) - (eb - lb) - 27, 23, 127), _INF)


@njit
def _exact_encode(magnitude, mantissa_bits, bias, max_code):
    significand, exponent = _parts(magnitude)
    return min(_round(significand, exponent, mantissa_bits, bias), max_code)


@njit(nogil=True, cache=True)
def ue4m3_reciprocals(global_scale, largest, values, reciprocals):
    """What two-level scaling needs of a global scale (fp32 bits), as ``rounding.block_scale``.

    Fills ``reciprocals`` (int32 bits, one a code) from ``values``, the fp32 bits of the codes, and
    returns the bits of (1 / global_scale) / largest, by which an amax becomes a scale.
    """
    for code in range(values.size):
        dequant = _exact_multiply(np.int64(values[code]), global_scale)
        reciprocals[code] = min(_exact_divide(0x3F800000, dequant), _MAX) if dequant else 0
    return _exact_divide(min(_exact_divide(0x3F800000, global_scale), _MAX), largest)


# --- quantize -------------------------------------------------------------------------------------


@njit(forceinline=True)
def _row(x, start, valid, n, line):
    """``n`` items from ``start``; in ``line``, padded with zeros, where only ``valid`` exist."""
    if valid >= n:
        return x[start : start + n]
    line[:valid] = x[start : start + valid]
    line[valid:n] = 0
    return line[:n]


@njit
def _column_amax(row, amax, limit):
    """Take a row into the maxima of its columns; what exceeds ``limit`` is left out."""
    for c in range(row.size):
        m = _magnitude(row[c])
        amax[c] = max(amax[c], m if m <= limit else type(m)(0))


@njit
def _block_amax(row, size, amax):
    for b in range(row.size // size):
        m = _amax16(row, b * size)
        for i in range(b * size + 16, b * size + size, 16):
            m = max(m, _amax16(row, i))
        amax[b] = m


@njit
def _scales(amax, spec, encode_scale, table, code, reciprocal, odd):
    """Scale codes and reciprocals of blocks; ``odd`` and the result tell what is not exact here."""
    any_odd = np.uint8(0)
    small = np.int32(_SMALL if encode_scale >= _SMALL else _INF)
    factor, largest = _float(np.int32(encode_scale)), _float(np.int32(spec.max_bits))
    for b in range(amax.size):
        m = _fp32(amax[b])
        if spec.kind == _POWER_OF_TWO:
            up = np.int32(1 if (m & 0x7FFFFF) > spec.limit else 0)
            byte = np.int32(_shr(m, np.int32(23)) - spec.max_exponent + up)
            byte = np.int32(min(max(byte, spec.min_byte), 254))
            code[b] = _shl(byte, np.int32(spec.shift))
            r = _shl(np.int32(254 - byte), np.int32(23))
        elif spec.kind == _NEAREST_FP32:
            code[b] = max(_bits(_float(m) / largest), np.int32(0x00800000))
            r = _bits(np.float32(1) / _float(code[b]))
        else:
            top = np.int32(0x43E00000)  # 448: the scale is an E4M3, whatever the element
            code[b] = _encode(m, factor, np.int32((127 - 6) << 23), np.int32(20), top)
            r = table[code[b]]
        reciprocal[b] = _float(r)
        far = r >= _LARGE or (r > 0 and r < 0x00800000)
        odd[b] = np.uint8(m >= _INF or (m > 0 and (m < small or far)))
        any_odd |= odd[b]
    return any_odd


@njit
def _encode_row(row, reciprocal, out, spec):
    lowest, shift = np.int32((128 - spec.bias) << 23), np.int32(23 - spec.mantissa_bits)
    top, sign = np.int32(spec.max_bits), np.int32(1 << (spec.bits - 1))
    down = np.int32(32 - spec.bits)
    for c in range(out.size):
        v = _fp32(row[c])
        code = _encode(np.int32(v & np.int32(0x7FFFFFFF)), reciprocal[c], lowest, shift, top)
        out[c] = np.uint8(np.int32(code | np.int32(_shr(v, down) & sign)))


@njit
def _exact_scale(amax, spec, encode_scale, table):
    """``rounding.block_scale`` of one block: the code and the bits of the reciprocal."""
    if spec.kind == _POWER_OF_TWO:
        up = 1 if (amax & 0x7FFFFF) > spec.limit else 0
        byte = min(max((amax >> 23) - spec.max_exponent + up, spec.min_byte), 254)
        return byte << spec.shift, (254 - byte) << 23 if byte < 254 else 0x00400000
    if spec.kind == _NEAREST_FP32:
        bits = max(_exact_divide(amax, spec.max_bits), 0x00800000)
        return bits, _exact_divide(0x3F800000, bits)
    code = _exact_encode(_exact_multiply(amax, encode_scale), 3, 7, 0x7E)
    return code, np.int64(table[code])


@njit
def _exact_block(x, start, rows, columns, geometry, spec, encode_scale, table, codes, to, stride, area):
    """Quantize one block, ``rows`` x ``columns`` of x, the slow way; write ``area`` codes of it."""
    amax, nan, inf = 0, False, False
    for r in range(rows):
        for c in range(columns):
            m = np.int64(_fp32(x[start + r * geometry.row_stride + c])) & 0x7FFFFFFF
            nan, inf = nan or m > _INF, inf or m == _INF
            amax = max(amax, m if m < _INF else 0)
    scale, reciprocal = _exact_scale(amax, spec, encode_scale, table)
    if nan or inf:
        if spec.propagate:
            scale = spec.scale_nan
        elif inf:
            scale = spec.scale_max
    for r in range(area[0]):
        for c in range(area[1]):
            v = 0
            if r < rows and c < columns:
                v = np.int64(_fp32(x[start + r * geometry.row_stride + c]))
            m, sign = v & 0x7FFFFFFF, ((v >> 31) & 1) << (spec.bits - 1)
            if spec.propagate and (nan or inf):
                code = spec.block_nan_code
            elif m > _INF:
                code = spec.nan_code
            elif m == _INF:
                code = spec.max_code | sign
            elif inf:
                code = 0
            else:
                product = _exact_multiply(m, reciprocal)
                code = _exact_encode(product, spec.mantissa_bits, spec.bias, spec.max_code) | sign
            codes[to + r * stride + c] = code
    return scale
