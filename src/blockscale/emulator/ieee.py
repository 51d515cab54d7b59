"""IEEE arithmetic that numpy lacks: rounding modes, sums rounded to odd, 16-bit floats.

A sum rounded to odd in fp64 is not disturbed by a second rounding to fp32 or less (Boldo and
Melquiond, 2008). That gives fma and every rounding mode of the types below fp64.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

_QUIET = np.uint32(0x7FFFFFFF)  # the NaN that fp32 arithmetic gives
TINY32, TINY16 = np.float32(2**-126), np.float32(2**-14)  # the smallest normal numbers


def two_sum_error(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """What rounding took from ``total`` = a + b (Knuth)."""
    virtual = total - a
    return (a - (total - virtual)) + (b - virtual)


def two_sum_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b in fp64 rounded to odd: if inexact, the last bit is set on the side of the truth."""
    total = a + b
    error = two_sum_error(a, b, total)
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & ((bits & 1) == 0)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + toward, bits).view(np.float64)


def directed(value: np.ndarray, bits: np.ndarray, back: np.ndarray, rounding: str) -> np.ndarray:
    """The bits of ``value`` rounded: ``bits`` are those of the nearest number, whose value is
    ``back``."""
    if rounding == "rz":
        return np.where(np.abs(back) > np.abs(value), bits - 1, bits)
    if rounding == "odd":
        wrong, inexact = np.abs(back) > np.abs(value), (back != value) & ~np.isnan(value)
        return np.where(inexact, (bits - wrong) | 1, bits)
    up = rounding == "rp"
    wrong = back < value if up else back > value
    return np.where(wrong, np.where((value > 0) == up, bits + 1, bits - 1), bits)


def to_float32(value: np.ndarray, rounding: str) -> np.ndarray:
    """fp64 (exact or rounded to odd) -> fp32 in a rounding mode; fp32 stays as it is."""
    value = np.asarray(value)
    near = value.astype(np.float32, copy=False)
    if rounding == "rn" or near is value:
        return near
    bits = directed(value, near.view(np.int32), near.astype(np.float64), rounding)
    return bits.astype(np.int32).view(np.float32)


def to_half(value: np.ndarray, type: str, rounding: str = "rn") -> np.ndarray:
    """fp64 (exact or rounded to odd) -> the bits of f16 or bf16."""
    bits = _nearest_half(to_float32(value, "odd"), type)
    if rounding == "rn":
        return bits
    back = split(bits, type)[:, 0].astype(np.float64)
    moved = directed(value, bits.astype(np.int32), back, rounding)
    return np.where(np.isnan(value), 0x7FFF, moved).astype(np.uint16)


def _nearest_half(value: np.ndarray, type: str) -> np.ndarray:
    """fp32 -> bits of f16 or bf16, to nearest even, NaN 0x7fff."""
    if type.startswith("bf16"):
        word = np.asarray(value, np.float32).view(np.uint32)
        bits = (word + 0x7FFF + (word >> 16 & 1)) >> 16  # NaN may wrap
    else:
        with np.errstate(all="ignore"):
            bits = np.asarray(value).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(value), 0x7FFF, bits).astype(np.uint16)


def flush(value: Any, tiny: Any = TINY32) -> Any:
    """Subnormals to zeros of their sign (.ftz)."""
    small = np.abs(value) < tiny
    return np.where(small, np.copysign(np.float32(0), value), value) if small.any() else value


def canonical(value: Any) -> np.ndarray:
    """fp32 results: every NaN is 0x7fffffff."""
    value = np.asarray(value, np.float32)
    squares = np.vdot(value, value)  # is NaN if anything is: the fastest way to ask
    if squares == squares:
        return value
    return np.where(np.isnan(value), _QUIET, value.view(np.uint32)).view(np.float32)


def clamp(value: Any, sat: bool, relu: bool) -> Any:
    """.sat: into [0, 1], NaN becomes 0. .relu: negative becomes 0, NaN stays. Zeros become +0."""
    if sat:
        value = np.where(value > 0, np.minimum(value, 1), 0).astype(np.asarray(value).dtype)
    if relu:
        value = np.where(value <= 0, 0, value).astype(np.asarray(value).dtype)
    return value


def split(value: Any, type: str) -> np.ndarray:
    """(threads, parts) float32 of a packed register."""
    value = np.atleast_1d(np.asarray(value))
    if type == "f32x2":
        return value.view(np.uint32).reshape(-1, 2).view(np.float32)
    parts = value.view(np.uint16).reshape(len(value), -1)
    if type.startswith("bf16"):
        return (parts.astype(np.uint32) << 16).view(np.float32)
    return parts.view(np.float16).astype(np.float32)


def join(parts: np.ndarray, type: str) -> np.ndarray:
    """The inverse of :func:`split`; fp32 -> 16 bits to nearest even."""
    if type == "f32x2":
        return np.ascontiguousarray(parts.astype(np.float32)).view(np.uint64)[:, 0]
    kept = np.uint32 if type.endswith("x2") else np.uint16
    return np.ascontiguousarray(_nearest_half(parts, type)).view(kept)[:, 0]


def lower(a: Any, b: Any) -> np.ndarray:
    """min: a NaN loses, -0 < +0."""
    first = (a < b) | ((a == b) & np.signbit(a)) | np.isnan(b)
    return np.where(first, a, b)


def higher(a: Any, b: Any) -> np.ndarray:
    """max: a NaN loses, -0 < +0."""
    first = (a > b) | ((a == b) & np.signbit(b)) | np.isnan(b)
    return np.where(first, a, b)


def fma64(a: Any, b: Any, c: Any) -> np.ndarray:
    """fma.rn.f64. Far from overflow and underflow by Boldo and Melquiond, "Emulation of FMA and
    correctly rounded sums: proved algorithms using rounding to odd"; elsewhere by fractions."""
    a, b, c = np.broadcast_arrays(*(np.atleast_1d(np.asarray(v, np.float64)) for v in (a, b, c)))
    near = (np.abs(a) > _FAR[0]) & (np.abs(a) < _FAR[1]) & (np.abs(b) > _FAR[0])
    near &= (np.abs(b) < _FAR[1]) & (((np.abs(c) > _FAR[0]) & (np.abs(c) < _FAR[1])) | (c == 0))
    high = a * b
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    low = a2 * b2 - (((high - a1 * b1) - a2 * b1) - a1 * b2)  # Dekker: a b is high + low
    inner = c + low
    outer = high + inner
    rest = two_sum_to_odd(two_sum_error(c, low, inner), two_sum_error(high, inner, outer))
    out = np.asarray(outer + rest)
    if not near.all():
        far = ~near
        out[far] = np.vectorize(exact_fp64("fma", "rn"), [float])(a[far], b[far], c[far])
    return out


_FAR = (2.0**-400, 2.0**400)


def _halves(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of 26 bits each (Veltkamp)."""
    scaled = a * (2.0**27 + 1)
    high = scaled - (scaled - a)
    return high, a - high


def exact_fp64(name: str, rounding: str) -> Any:
    """fp64 arithmetic through exact fractions: slow, and rare in kernels."""

    def run(a: float, b: float, c: float = 0.0) -> float:
        values = (a, b, c)
        if not all(map(math.isfinite, values)):
            return (
                a * b + c
                if name == "fma"
                else a * b
                if name == "mul"
                else a + (b if name == "add" else -b)
            )
        x, y, z = map(Fraction, values)
        exact = {"add": x + y, "sub": x - y, "mul": x * y, "fma": x * y + z}[name]
        if exact == 0:
            if name == "mul":
                return a * b
            addends = (a * b, c) if name == "fma" else (a, b if name == "add" else -b)
            signs = [math.copysign(1, v) for v in addends]
            if name == "fma" and x * y != 0:  # the product may have underflown, its sign did not
                signs = [1.0, -1.0]
            negative = max(signs) < 0 or (rounding == "rm" and min(signs) < 0)
            return -0.0 if negative else 0.0
        return _round_fraction(exact, rounding)

    return run


def _round_fraction(exact: Fraction, rounding: str) -> float:
    try:
        near = exact.numerator / exact.denominator
    except OverflowError:
        near = math.inf if exact > 0 else -math.inf
    if near == 0:
        near = 0.0 if exact > 0 else -0.0
    if rounding == "rn" or near == exact:
        return near
    toward = {"rz": 0.0, "rm": -math.inf, "rp": math.inf}[rounding]
    over = abs(near) > abs(exact) if rounding == "rz" else (near > exact) == (rounding == "rm")
    return math.nextafter(near, toward) if over else near
