"""The formats once more, from their definitions, in float64: exact for every fp32 input."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Spec:
    """OFP8 v1.0 table 1 and OCP MX v1.0 tables 2 to 5; ``nan`` is the code a NaN is cast to."""

    bits: int
    mantissa_bits: int
    min_exponent: int
    max_exponent: int
    max: float
    nan: int

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def step(self) -> float:
        """Between subnormals."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)


SPECS = {
    "E4M3": Spec(8, 3, -6, 8, 448.0, 0x7F),
    "E5M2": Spec(8, 2, -14, 15, 57344.0, 0x7F),
    "E3M2": Spec(6, 2, -2, 4, 28.0, 0x1F),
    "E2M3": Spec(6, 3, 0, 2, 7.5, 0x1F),
    "E2M1": Spec(4, 1, 0, 2, 6.0, 0x07),
}


def step_at(x: NDArray, spec: Spec) -> NDArray:
    """Distance of the format's values around ``x``."""
    exponent = np.frexp(np.abs(x))[1] - 1
    return np.ldexp(1.0, np.maximum(exponent, spec.min_exponent) - spec.mantissa_bits)


def nearest(x: NDArray, spec: Spec) -> NDArray:
    """float64 values rounded to the nearest of the format, ties to even, saturating."""
    step = step_at(x, spec)
    return np.copysign(np.minimum(np.rint(np.abs(x) / step) * step, spec.max), x)


def code_of(value: NDArray, spec: Spec) -> NDArray:
    """Codes of float64 numbers that the format has; its NaN code for NaN."""
    magnitude = np.abs(np.where(np.isnan(value), 0.0, value))
    fraction, exponent = np.frexp(magnitude)
    field = exponent - spec.min_exponent  # one more than that of a normal number
    normal = (field - 1 + fraction * 2) * 2**spec.mantissa_bits
    code = np.where(magnitude < 2.0**spec.min_exponent, magnitude / spec.step, normal)
    code = code.astype(np.uint8) | (np.signbit(value) * spec.sign).astype(np.uint8)
    return np.where(np.isnan(value), spec.nan, code).astype(np.uint8)


def cast(x: NDArray, spec: Spec) -> NDArray:
    """Codes of fp32 or float64 values."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        x = x.astype(np.float64)
    return code_of(np.where(np.isnan(x), np.nan, nearest(x, spec)), spec)


def value_of(code: NDArray, spec: Spec) -> NDArray:
    """float64 values of codes that are numbers."""
    magnitude = (code & (spec.sign - 1)).astype(np.int64)
    field, mantissa = magnitude >> spec.mantissa_bits, magnitude & (2**spec.mantissa_bits - 1)
    significand = mantissa + (field > 0) * 2**spec.mantissa_bits
    exponent = np.maximum(field, 1) - 1 + spec.min_exponent - spec.mantissa_bits
    return np.ldexp(np.where(code & spec.sign, -1.0, 1.0) * significand, exponent)


def scale_byte(amax: NDArray, spec: Spec, rounding: str) -> NDArray:
    """E8M0 byte of finite block maxima, int64: each mode as its sentence in docs/numerics.md."""
    amax = np.abs(amax.astype(np.float64))
    zero, amax = amax == 0, np.where(amax == 0, 1.0, amax)
    log2 = np.frexp(amax)[1] - 1  # floor(log2(amax))
    if rounding == "floor":
        exponent = log2 - spec.max_exponent
    elif rounding == "ceil":
        exponent = log2 + (amax > np.ldexp(1.0, log2)) - spec.max_exponent
    elif rounding == "even":  # amax rounded to the element's mantissa first
        step = np.ldexp(1.0, log2 - spec.mantissa_bits)
        exponent = np.frexp(np.rint(amax / step) * step)[1] - 1 - spec.max_exponent
    else:  # rceil: the smallest power of two with amax <= spec.max * 2**exponent
        exponent = log2 - spec.max_exponent
        exponent = exponent + (np.ldexp(spec.max, exponent) < amax)
    return np.where(zero, 0, np.clip(exponent + 127, 0, 254))
