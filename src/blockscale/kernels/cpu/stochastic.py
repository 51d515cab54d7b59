# mypy: ignore-errors
"""Stochastic rounding: ``philox.random_bits`` and what it decides, as compiled loops.

Compared with fp32's own rounding, which :func:`arith.encode` uses, the part cut off is at hand as
an integer and is compared with 32 random bits. It counts down to 2^-32 of an element's quantum,
2^-48 for the finest: products with subnormals, which flush-to-zero would change, must be smaller.
"""

from __future__ import annotations

import numpy as np

from ...jit import compiled, inlined
from .arith import cut, fp32, parts
from .intrinsics import as_bits, as_float, shl, shr

ROOM = 8  # items that random bits of a row need beyond it: counters stand for four elements
_MASK = 0xFFFFFFFF
_SIGN = np.int32(-0x80000000)


@compiled
def draw(seed, first, n, out):
    """Random bits (int32) of elements ``first`` to ``first + n``; ``seed``: its value and step.

    Returns where in ``out``, which has room for ``n + ROOM``, they begin.
    """
    counter = first >> 2
    for i in range((first - 4 * counter + n + 3) >> 2):
        c0, c1 = (counter + i) & _MASK, (counter + i) >> 32
        c2, c3 = seed[1] & _MASK, (seed[1] >> 32) & _MASK
        k0, k1 = seed[0] & _MASK, (seed[0] >> 32) & _MASK
        for _ in range(10):  # int64 products wrap, which leaves their 64 bits as they should be
            p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
            c0 = ((p1 >> 32) & _MASK) ^ c1 ^ k0
            c2 = ((p0 >> 32) & _MASK) ^ c3 ^ k1
            c1, c3 = p1 & _MASK, p0 & _MASK
            k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
        out[4 * i] = np.int32(c0)
        out[4 * i + 1] = np.int32(c1)
        out[4 * i + 2] = np.int32(c2)
        out[4 * i + 3] = np.int32(c3)
    return first - 4 * counter


@inlined
def encode(magnitude, reciprocal, lowest, shift, top, noise):
    """As ``arith.encode``, but up where ``noise`` is below the part cut off.

    A product below the normal numbers is taken for 2^-126 or so; nothing of that is left, either.
    """
    product = min(as_bits(as_float(magnitude) * reciprocal), top)
    field, least = shr(product, np.int32(23)), shr(lowest, np.int32(23))
    significand = np.int32(shl(product, np.int32(8)) | _SIGN)  # 24 bits, at the top
    right = np.int32(shift + max(np.int32(least - field), np.int32(0)))  # bits cut off, 20 or more
    kept = shr(shr(significand, np.int32(1)), min(np.int32(right + 7), np.int32(31)))
    beyond = np.int32(right - np.int32(24))
    aligned = shl(significand, max(np.int32(-beyond), np.int32(0)))
    fraction = shr(aligned, min(max(beyond, np.int32(0)), np.int32(31)))
    fraction = np.int32(0) if beyond > np.int32(31) else fraction
    up = np.int32(np.int32(noise ^ _SIGN) < np.int32(fraction ^ _SIGN))  # as unsigned numbers
    binades = max(np.int32(field - least), np.int32(0))
    return np.int32(np.int32(kept + up) + shl(binades, np.int32(np.int32(23) - shift)))


@compiled
def encode_row(row, reciprocal, noise, out, spec):
    lowest, shift = np.int32((128 - spec.bias) << 23), np.int32(23 - spec.mantissa_bits)
    top, sign = np.int32(spec.max_bits), np.int32(1 << (spec.bits - 1))
    down = np.int32(32 - spec.bits)
    for c in range(out.size):
        v = fp32(row[c])
        code = encode(
            np.int32(v & np.int32(0x7FFFFFFF)), as_float(reciprocal[c]), lowest, shift, top,
            noise[c],
        )  # fmt: skip
        out[c] = np.uint8(np.int32(code | np.int32(shr(v, down) & sign)))


@compiled
def exact_encode(magnitude, mantissa_bits, bias, max_code, noise):
    """As ``arith.exact_encode``, but up where ``noise`` (int32) is below the part cut off."""
    significand, exponent = parts(magnitude)
    code, dropped, right = cut(significand, exponent, mantissa_bits, bias)
    fraction = dropped << (32 - right) if right <= 32 else dropped >> (right - 32)
    if (np.int64(noise) & _MASK) < fraction:
        code += 1
    return min(code, max_code)
