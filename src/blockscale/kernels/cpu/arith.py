# mypy: ignore-errors
"""Arithmetic for compiled loops: fp32 and narrow floats as integers.

numba widens int32 arithmetic to int64; hence the casts here and in the loops, without which vectors
would hold half as many numbers.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types
from numba.extending import overload

from ...jit import compiled, inlined, spliced
from .intrinsics import as_bits, as_float, shl, shr

INF = 0x7F800000
NAN = 0x7FC00000
FP32_MAX = 0x7F7FFFFF
ONE = 0x3F800000
MIN_NORMAL = 0x00800000
_FP32 = np.int64(23), np.int64(127)  # mantissa bits, bias; typed, or numba compiles them in


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
def parts(magnitude):
    """Significand and exponent of a finite fp32 magnitude."""
    field = magnitude >> 23
    if field == 0:
        return magnitude, -149
    return (magnitude & 0x7FFFFF) | 0x800000, field - 150


@compiled
def cut(significand, exponent, mantissa_bits, bias):
    """``rounding.round_significand`` of one number up to the choice between down and up.

    Returns the code of what is kept, what is dropped, and of how many bits that is.
    """
    if significand == 0:
        return np.int64(0), np.int64(0), np.int64(0)
    top = exponent + _bit_length(significand) - 1
    quantum = max(top, 1 - bias) - mantissa_bits
    right = min(max(quantum - exponent, 0), 62)
    left = min(max(exponent - quantum, 0), 52)
    kept = (significand << left) >> right
    code = kept + ((quantum + mantissa_bits + bias - 1) << mantissa_bits)
    return code, significand & ((1 << right) - 1), right


@compiled
def _round(significand, exponent, mantissa_bits, bias):
    """``rounding.round_significand`` of one number, to nearest even."""
    code, dropped, right = cut(significand, exponent, mantissa_bits, bias)
    half = (1 << right) >> 1
    # the last bit of the code is that of what is kept: no format here has less than one
    if dropped > half or (dropped == half and right > 0 and code & 1 == 1):
        code += 1
    return code


@compiled
def exact_multiply(a, b):
    """``rounding.multiply`` of two numbers (fp32 bits, int64)."""
    sign = (a ^ b) & 0x80000000
    a, b = a & 0x7FFFFFFF, b & 0x7FFFFFFF
    if a > INF or b > INF or (max(a, b) == INF and min(a, b) == 0):
        return NAN
    if a == INF or b == INF:
        return INF | sign
    (sa, ea), (sb, eb) = parts(a), parts(b)
    return min(_round(sa * sb, ea + eb, *_FP32), INF) | sign


@compiled
def exact_divide(a, b):
    """``rounding.divide`` of two numbers, a >= 0 and b > 0."""
    (sa, ea), (sb, eb) = parts(a), parts(b)
    la, lb = 24 - _bit_length(sa), 24 - _bit_length(sb)
    sa, sb = sa << la, sb << lb
    quotient = (sa << 26) // sb
    sticky = 1 if quotient * sb != sa << 26 else 0
    return min(_round((quotient << 1) | sticky, (ea - la) - (eb - lb) - 27, *_FP32), INF)


@compiled
def exact_encode(magnitude, mantissa_bits, bias, max_code):
    significand, exponent = parts(magnitude)
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
