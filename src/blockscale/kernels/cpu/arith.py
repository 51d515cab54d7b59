# mypy: ignore-errors
"""Arithmetic for compiled loops: what numba lacks, exact fp32 in integers, the fast element cast.

numba widens int32 arithmetic to int64; hence the casts here and in the loops, without which vectors
would hold half as many numbers.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

INF = 0x7F800000
NAN = 0x7FC00000
FP32_MAX = 0x7F7FFFFF
ONE = 0x3F800000
MIN_NORMAL = 0x00800000
_FP32 = np.int64(23), np.int64(127)  # mantissa bits, bias; typed, or numba compiles them in


# Without reference counts, which numba does not get out of the loops, some of them are twice as
# fast. All memory therefore comes from the caller. Functions that only compiled code calls need no
# wrappers; "spliced" become part of theirs, which saves optimizing the whole once more.
_OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False}
entry = njit(cache=True, **_OPTIONS)
entry_without_cache = njit(**_OPTIONS)
compiled = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)
inlined = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True, **_OPTIONS)
spliced = njit(inline="always", **_OPTIONS)


# --- what numba lacks -----------------------------------------------------------------------------


def _binary(name, result, left, right):
    def typed(context, a, b):
        return result(left, right), lambda _, builder, __, args: getattr(builder, name)(*args)

    return intrinsic(typed)


def _bitcast(result, given, llvm):
    def typed(context, v):
        return result(given), lambda _, builder, __, args: builder.bitcast(args[0], llvm)

    return intrinsic(typed)


shl = _binary("shl", types.int32, types.int32, types.int32)
shr = _binary("lshr", types.int32, types.int32, types.int32)
as_float = _bitcast(types.float32, types.int32, ir.FloatType())
as_bits = _bitcast(types.int32, types.float32, ir.IntType(32))


def vector_pointer(context, builder, array_type, array, index, lanes):
    """Pointer to items of a contiguous array, as a vector, and the vector's type."""
    pointer = builder.gep(context.make_array(array_type)(context, builder, array).data, [index])
    vector = ir.VectorType(context.get_data_type(array_type.dtype), lanes)
    return builder.bitcast(pointer, vector.as_pointer()), vector


def _amax(lanes):
    """Largest magnitude of so many items (integers of 16 or 32 bits, sign on top) from an index."""

    def typed(context, array, index):
        def generate(context, builder, signature, args):
            pointer, vector = vector_pointer(context, builder, array, *args, lanes)
            bits = vector.element.width
            value = builder.load(pointer, align=bits // 8, typ=vector)
            value = builder.and_(value, ir.Constant(vector, [(1 << (bits - 1)) - 1] * lanes))
            name = f"llvm.vector.reduce.umax.v{lanes}i{bits}"
            kind = ir.FunctionType(vector.element, [vector])
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [value])

        return array.dtype(array, types.intp), generate

    return intrinsic(typed)


amax16, amax32 = _amax(16), _amax(32)


@intrinsic
def fill16(context, array, index, value):
    """Store ``value`` in 16 items."""

    def generate(context, builder, signature, args):
        pointer, vector = vector_pointer(context, builder, array, *args[:2], 16)
        filled = ir.Constant(vector, ir.Undefined)
        for lane in range(16):
            filled = builder.insert_element(filled, args[2], ir.Constant(ir.IntType(32), lane))
        builder.store(filled, pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), generate


@intrinsic
def transpose16(context, source, start, stride, out, to, out_stride):
    """Transpose 16 x 16 bytes: four perfect shuffles of its rows."""

    def generate(context, builder, signature, args):
        def row(array_type, array, start, stride, i):
            index = builder.add(start, builder.mul(stride, ir.Constant(stride.type, i)))
            return vector_pointer(context, builder, array_type, array, index, 16)

        def interleave(a, b, first):
            lanes = [first + i // 2 + 16 * (i % 2) for i in range(16)]
            return builder.shuffle_vector(
                a, b, ir.Constant(ir.VectorType(ir.IntType(32), 16), lanes)
            )

        given = [row(source, *args[:3], i) for i in range(16)]
        rows = [builder.load(pointer, align=1, typ=vector) for pointer, vector in given]
        for _ in range(4):
            pairs = zip(rows[:8], rows[8:], strict=True)
            rows = [interleave(a, b, first) for a, b in pairs for first in (0, 8)]
        for i in range(16):
            builder.store(rows[i], row(out, *args[3:], i)[0], align=1)
        return context.get_dummy_value()

    index = types.intp
    return types.void(source, index, index, out, index, index), generate


# --- fp32 and narrow floats, as integers ----------------------------------------------------------
# x arrives as int32 (float32), uint16 (bfloat16) or int16 (float16): its type says how to read it.


def fp32(v):
    """fp32 bits (int32) of an item of x."""


@overload(fp32)
def _fp32(v):
    if v == types.uint16:
        return lambda v: shl(np.int32(v), np.int32(16))
    if v == types.int16:
        return _fp32_from_half
    return lambda v: v


def _fp32_from_half(v):
    half = np.int32(v & 0x7FFF)
    normal = shl(np.int32(half + (112 << 10)), np.int32(13))
    subnormal = as_bits(np.float32(half) * np.float32(2.0**-24))
    special = np.int32(shl(half, np.int32(13)) | INF)
    magnitude = subnormal if half < 0x400 else (special if half >= 0x7C00 else normal)
    return np.int32(magnitude | (np.int32(v) & np.int32(-0x80000000)))


def magnitude(v):
    """An item of x without its sign; the order of the numbers is kept."""


@overload(magnitude)
def _magnitude(v):
    if v == types.uint16:
        return lambda v: np.uint16(v & 0x7FFF)
    if v == types.int16:
        return lambda v: np.int16(v & 0x7FFF)
    return lambda v: np.int32(v & 0x7FFFFFFF)


def store(out, i, bits):
    """Write fp32 bits as float32 (int32) or, to nearest even, as bfloat16 (uint16)."""


@overload(store)
def _store(out, i, bits):
    if out.dtype == types.int32:

        def store(out, i, bits):
            out[i] = bits
    else:

        def store(out, i, bits):
            odd = np.int32(shr(bits, np.int32(16)) & np.int32(1))
            out[i] = np.uint16(shr(np.int32(bits + np.int32(0x7FFF) + odd), np.int32(16)))

    return store


@inlined
def encode(magnitude, reciprocal, lowest, shift, top):
    """Code (int32, sign clear) of fp32 bits ``magnitude`` times ``reciprocal``, saturating.

    ``lowest`` and ``top`` are the bits of the smallest normal and the largest value, ``shift`` is
    23 - mantissa_bits. Adding 2^shift times the product's binade (at least the lowest one) makes
    fp32 itself round to the element's quantum and leaves the multiple in the low bits.
    """
    product = min(as_bits(as_float(magnitude) * reciprocal), top)
    binade = max(np.int32(product & np.int32(INF)), lowest)
    anchor = np.int32(binade + shl(shift, np.int32(23)))
    multiple = np.int32(as_bits(as_float(product) + as_float(anchor)) - anchor)
    return np.int32(multiple + shr(np.int32(binade - lowest), shift))


@compiled
def _bit_length(n):
    return math.frexp(float(n))[1]


@compiled
def _parts(magnitude):
    field = magnitude >> 23
    if field == 0:
        return magnitude, -149
    return (magnitude & 0x7FFFFF) | 0x800000, field - 150


@compiled
def _round(significand, exponent, mantissa_bits, bias):
    """``rounding.round_significand`` of one number, to nearest even."""
    if significand == 0:
        return np.int64(0)
    top = exponent + _bit_length(significand) - 1
    quantum = max(top, 1 - bias) - mantissa_bits
    right = min(max(quantum - exponent, 0), 62)
    left = min(max(exponent - quantum, 0), 52)
    kept = (significand << left) >> right
    dropped, half = significand & ((1 << right) - 1), (1 << right) >> 1
    if dropped > half or (dropped == half and right > 0 and kept & 1 == 1):
        kept += 1
    return kept + ((quantum + mantissa_bits + bias - 1) << mantissa_bits)


@compiled
def exact_multiply(a, b):
    """``rounding.multiply`` of two numbers (fp32 bits, int64)."""
    sign = (a ^ b) & 0x80000000
    a, b = a & 0x7FFFFFFF, b & 0x7FFFFFFF
    if a > INF or b > INF or (max(a, b) == INF and min(a, b) == 0):
        return NAN
    if a == INF or b == INF:
        return INF | sign
    (sa, ea), (sb, eb) = _parts(a), _parts(b)
    return min(_round(sa * sb, ea + eb, *_FP32), INF) | sign


@compiled
def exact_divide(a, b):
    """``rounding.divide`` of two numbers, a >= 0 and b > 0."""
    (sa, ea), (sb, eb) = _parts(a), _parts(b)
    la, lb = 24 - _bit_length(sa), 24 - _bit_length(sb)
    sa, sb = sa << la, sb << lb
    quotient = (sa << 26) // sb
    sticky = 1 if quotient * sb != sa << 26 else 0
    return min(_round((quotient << 1) | sticky, (ea - la) - (eb - lb) - 27, *_FP32), INF)


@compiled
def exact_encode(magnitude, mantissa_bits, bias, max_code):
    significand, exponent = _parts(magnitude)
    return min(_round(significand, exponent, mantissa_bits, bias), max_code)


@spliced
def ue4m3_reciprocals(global_scale, largest, values, reciprocals):
    """What two-level scaling needs of a global scale (fp32 bits), as ``rounding.block_scale``.

    Fills ``reciprocals`` (int32 bits, one a code) from ``values``, the fp32 bits of the codes, and
    returns the bits of (1 / global_scale) / largest, by which an amax becomes a scale.
    """
    for code in range(values.size):
        dequant = exact_multiply(np.int64(values[code]), global_scale)
        reciprocals[code] = min(exact_divide(np.int64(ONE), dequant), FP32_MAX) if dequant else 0
    return exact_divide(min(exact_divide(np.int64(ONE), global_scale), FP32_MAX), largest)
