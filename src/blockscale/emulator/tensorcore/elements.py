"""The number formats that tensor cores read: PTX ISA 5.2.3 and the operand types of 9.7.15-9.7.16.

Every value is exact in fp64. The exponent of a number is that of its leading bit, but a subnormal
one has the exponent of the smallest normal number: the hardware aligns products by these fields
and never normalizes a significand first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

__all__ = ["ELEMENTS", "NO_EXPONENT", "Element", "decode"]

NO_EXPONENT = -(1 << 13)  # of zeros, infinities and NaNs: a sum of two still loses every maximum


@dataclass(frozen=True, slots=True)
class Element:
    """How a code is read: [sign] exponent fraction, from the high bits down."""

    exponent: int  # bits
    fraction: int  # bits
    bias: int
    special: (
        str  # "none", "nan": all ones are NaN, "ieee": the largest exponent is infinity and NaN
    )
    signed: bool = True
    subnormal: bool = True  # exponent field 0 has no hidden one
    padding: int = 0  # low bits that the hardware ignores

    @property
    def bits(self) -> int:
        return self.signed + self.exponent + self.fraction + self.padding


ELEMENTS: Mapping[str, Element] = {
    "tf32": Element(8, 10, 127, "ieee", padding=13),
    "bf16": Element(8, 7, 127, "ieee"),
    "f16": Element(5, 10, 15, "ieee"),
    "e5m2": Element(5, 2, 15, "ieee"),
    "e4m3": Element(4, 3, 7, "nan"),
    "e3m2": Element(3, 2, 3, "none"),
    "e2m3": Element(2, 3, 1, "none"),
    "e2m1": Element(2, 1, 1, "none"),
    "ue8m0": Element(8, 0, 127, "nan", signed=False, subnormal=False),
    "ue4m3": Element(4, 3, 7, "nan", signed=False),
}


def decode(codes: np.ndarray, type: str) -> tuple[np.ndarray, np.ndarray]:
    """Values (float64) and exponents (int16, NO_EXPONENT where there is none) of ``codes``.

    Codes are unsigned integers, one element each; bits above those of the format are ignored, and
    so are the low 13 of tf32, so that a NaN with a payload only there is an infinity.
    """
    element = ELEMENTS[type]
    if element.bits > 16:
        return _read(codes, element)
    values, exponents = _table(element)
    index = codes & (len(values) - 1)
    return values.take(index), exponents.take(index)


@cache
def _table(element: Element) -> tuple[np.ndarray, np.ndarray]:
    return _read(np.arange(1 << element.bits, dtype=np.uint32), element)


def _read(codes: np.ndarray, element: Element) -> tuple[np.ndarray, np.ndarray]:
    bits = codes.astype(np.int64) >> element.padding
    fraction = bits & ((1 << element.fraction) - 1)
    field = bits >> element.fraction & ((1 << element.exponent) - 1)
    smallest = int(element.subnormal)
    exponents = np.maximum(field, smallest) - element.bias
    significand = fraction + ((field >= smallest).astype(np.int64) << element.fraction)
    values = np.ldexp(significand.astype(np.float64), exponents - element.fraction)
    last = field == (1 << element.exponent) - 1
    if element.special == "ieee":
        values = np.where(last, np.where(fraction == 0, np.inf, np.nan), values)
    elif element.special == "nan":
        values = np.where(last & (fraction == (1 << element.fraction) - 1), np.nan, values)
    if element.signed:
        negative = bits >> (element.exponent + element.fraction) & 1
        values = np.where(negative == 1, -values, values)
    known = np.isfinite(values) & (values != 0)
    return values, np.where(known, exponents, NO_EXPONENT).astype(np.int16)
