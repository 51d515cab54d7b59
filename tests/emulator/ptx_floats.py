"""Binary floating point on Python integers and fractions: what PTX arithmetic is compared with."""

from __future__ import annotations

import math
from fractions import Fraction as Fraction
from typing import Any

#: (bits of the exponent, bits of the mantissa)
FORMATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}
NAN, INFINITY = "nan", "inf"


def width(name: str) -> int:
    exponent, mantissa = FORMATS[name]
    return 1 + exponent + mantissa


def sign(bits: int, name: str) -> int:
    return bits >> (width(name) - 1) & 1


def decode(bits: int, name: str) -> Any:
    """The value of finite bits, a Fraction; "inf" and "nan" otherwise (the sign is apart)."""
    exponent, mantissa = FORMATS[name]
    field, rest = bits >> mantissa & ((1 << exponent) - 1), bits & ((1 << mantissa) - 1)
    if field == (1 << exponent) - 1:
        return NAN if rest else INFINITY
    bias = (1 << exponent - 1) - 1
    magnitude = rest + (bool(field) << mantissa)
    value = Fraction(magnitude) * Fraction(2) ** (max(field, 1) - bias - mantissa)
    return -value if sign(bits, name) else value


def infinity(negative: int, name: str) -> int:
    exponent, mantissa = FORMATS[name]
    return negative << exponent + mantissa | ((1 << exponent) - 1) << mantissa


def nan(name: str) -> int:
    """The canonical NaN of results: all bits set but the sign."""
    return (1 << width(name) - 1) - 1


def zero(negative: int, name: str) -> int:
    return negative << width(name) - 1


def rounded(value: Fraction, rounding: str) -> int:
    """To an integer."""
    down = math.floor(value)
    if rounding == "rn":
        return round(value)
    if rounding == "rm":
        return down
    up = down + (value != down)
    return up if rounding == "rp" or value < 0 else down


def encode(value: Fraction, name: str, rounding: str = "rn", negative_zero: int = 0) -> int:
    """Round an exact value; a zero that is exact takes its sign from ``negative_zero``."""
    exponent, mantissa = FORMATS[name]
    if value == 0:
        return zero(negative_zero, name)
    bias, negative = (1 << exponent - 1) - 1, int(value < 0)
    size = abs(value)
    power = size.numerator.bit_length() - size.denominator.bit_length()
    power -= size < Fraction(2) ** power
    quantum = max(power, 1 - bias) - mantissa
    steps = abs(rounded(value / Fraction(2) ** quantum, rounding))
    code = steps + (quantum + mantissa + bias - 1 << mantissa)
    largest = infinity(0, name) - 1
    if code > largest:
        stays = rounding == "rz" or rounding == ("rp" if negative else "rm")
        code = largest if stays else largest + 1
    return negative << width(name) - 1 | code


def flush(bits: int, name: str = "f32") -> int:
    """.ftz"""
    exponent, mantissa = FORMATS[name]
    return bits if bits >> mantissa & ((1 << exponent) - 1) else zero(sign(bits, name), name)


def add(a: int, b: int, name: str, rounding: str = "rn") -> int:
    x, y = decode(a, name), decode(b, name)
    if NAN in (x, y):
        return nan(name)
    if INFINITY in (x, y):
        if x == y and sign(a, name) != sign(b, name):
            return nan(name)
        return a if x == INFINITY else b
    same = sign(a, name) == sign(b, name)
    negative_zero = sign(a, name) if same else int(rounding == "rm")
    return encode(x + y, name, rounding, negative_zero)


def negate(bits: int, name: str) -> int:
    return bits ^ 1 << width(name) - 1


def multiply(a: int, b: int, name: str, rounding: str = "rn") -> int:
    x, y = decode(a, name), decode(b, name)
    negative = sign(a, name) ^ sign(b, name)
    if NAN in (x, y) or (INFINITY in (x, y) and 0 in (x, y)):
        return nan(name)
    if INFINITY in (x, y):
        return infinity(negative, name)
    return encode(x * y, name, rounding, negative)


def fma(a: int, b: int, c: int, name: str, rounding: str = "rn") -> int:
    x, y, z = (decode(v, name) for v in (a, b, c))
    negative = sign(a, name) ^ sign(b, name)
    if NAN in (x, y, z) or (INFINITY in (x, y) and 0 in (x, y)):
        return nan(name)
    if INFINITY in (x, y):
        return (
            nan(name) if z == INFINITY and sign(c, name) != negative else infinity(negative, name)
        )
    if z == INFINITY:
        return c
    negative_zero = negative if negative == sign(c, name) else int(rounding == "rm")
    return encode(x * y + z, name, rounding, negative_zero)


def divide(a: int, b: int, name: str, rounding: str = "rn") -> int:
    x, y = decode(a, name), decode(b, name)
    negative = sign(a, name) ^ sign(b, name)
    if NAN in (x, y) or (x == y and x in (0, INFINITY)):
        return nan(name)
    if x == INFINITY or y == 0:
        return infinity(negative, name)
    if y == INFINITY:
        return zero(negative, name)
    return encode(x / y, name, rounding, negative)


def square_root(a: int, name: str, rounding: str = "rn") -> int:
    x = decode(a, name)
    if x == 0 or a == infinity(0, name):
        return a
    if x == NAN or sign(a, name):
        return nan(name)
    # Four times the bits decide every rounding, with a last bit for what is cut off.
    scaled = x * Fraction(2) ** 600
    root = math.isqrt(math.floor(scaled * Fraction(4) ** 300))
    exact = Fraction(root) ** 2 == scaled * Fraction(4) ** 300
    return encode(Fraction(2 * root + (not exact), 2) / Fraction(2) ** 600, name, rounding)


def pick(a: int, b: int, name: str, low: bool) -> int:
    """min and max: a NaN loses, -0 < +0."""
    if decode(a, name) == NAN:
        return nan(name) if decode(b, name) == NAN else b
    if decode(b, name) == NAN:
        return a

    def key(bits: int) -> int:
        magnitude = bits & (1 << width(name) - 1) - 1
        return -magnitude - 1 if sign(bits, name) else magnitude

    return (min if low else max)(a, b, key=key)


def edges(name: str) -> list[int]:
    """Numbers around which arithmetic goes wrong, of both signs, and NaN with payloads."""
    exponent, mantissa = FORMATS[name]
    one = ((1 << exponent - 1) - 1) << mantissa
    top = infinity(0, name)
    magnitudes = [
        *(0, 1, 2, 3, (1 << mantissa) - 1, 1 << mantissa, (1 << mantissa) + 1),
        *(one, one - 1, one + 1, one + (1 << mantissa - 1), one - (1 << mantissa)),
        *(top, top - 1, top - 2, top + 1, top + (1 << mantissa - 1), top + (1 << mantissa) - 1),
    ]
    return [m | s << width(name) - 1 for m in magnitudes for s in (0, 1)]
