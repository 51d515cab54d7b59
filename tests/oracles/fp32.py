"""IEEE arithmetic once more, on exact rationals: binary32, binary16 and bfloat16, to nearest even.

Numbers are Python floats, which hold every value of these formats. Where an operand is zero,
infinite or NaN, Python's own arithmetic gives what the standard asks for.
"""

from __future__ import annotations

import math
from fractions import Fraction

#: precision, exponent of the smallest normal number, largest exponent
FP32, FP16, BF16 = (24, -126, 127), (11, -14, 15), (8, -126, 127)


def nearest(exact: Fraction, format: tuple[int, int, int] = FP32) -> float:
    """A rational rounded once; +0 for 0, and infinity where it is too large."""
    precision, lowest, highest = format
    if exact == 0:
        return 0.0
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, lowest) - precision + 1)
    rounded = round(magnitude / quantum) * quantum  # Python rounds ties to even
    value = math.inf if rounded >= Fraction(2) ** (highest + 1) else float(rounded)
    return math.copysign(value, exact)


def _ordinary(*values: float) -> bool:
    return all(math.isfinite(value) and value for value in values)


def multiply(a: float, b: float) -> float:
    return nearest(Fraction(a) * Fraction(b)) if _ordinary(a, b) else a * b


def add(a: float, b: float) -> float:
    return nearest(Fraction(a) + Fraction(b)) if _ordinary(a, b) else a + b


def fma(a: float, b: float, c: float) -> float:
    if _ordinary(a, b, c):
        return nearest(Fraction(a) * Fraction(b) + Fraction(c))
    return multiply(a, b) if c == 0 and _ordinary(a, b) else a * b + c


def divide(a: float, b: float) -> float:
    """The divisor is not zero."""
    return nearest(Fraction(a) / Fraction(b)) if _ordinary(a, b) else a / b


def square_root(a: float) -> float:
    """Of a number that is not negative."""
    if not _ordinary(a):
        return a
    scaled = Fraction(a) * 2**400  # a whole number, its root has more than 100 bits
    root = math.isqrt(scaled.numerator)
    sticky = root * root != scaled.numerator  # one more bit says whether something was cut off
    return nearest(Fraction(2 * root + sticky, 2**201))
