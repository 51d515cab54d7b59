"""Sums of terms in float64 as a tensor core makes them: aligned and cut, or exact."""

from __future__ import annotations

import math

import numpy as np

from ..ieee import two_sum_error, two_sum_to_odd

__all__ = ["aligned_sum", "exact_sum", "narrow_sum", "toward_zero"]


def aligned_sum(
    terms: np.ndarray, addend: np.ndarray, top: np.ndarray, fraction: int
) -> np.ndarray:
    """Sum of what the terms have above ``fraction`` bits below ``top``; overwrites the terms."""
    scale = np.ldexp(1.0, fraction - top)
    terms *= scale
    np.trunc(terms, out=terms)
    return np.ldexp(terms.sum(axis=0) + np.trunc(addend * scale), top - fraction)


def narrow_sum(
    terms: np.ndarray, addend: np.ndarray, top: np.ndarray, shift: np.ndarray, fraction: int
) -> np.ndarray:
    """The same of terms in float32, divided by 2^shift.

    Aligned, a term is less than 2^27, so that 16 of them fit into 32 bits. Below the least normal
    number, where the scale stays, nothing of a term is left.
    """
    exponents = np.clip(fraction - top + shift, -126, 127)
    terms *= (exponents + 127 << 23).astype(np.int32, copy=False).view(np.float32)
    whole = terms.astype(np.int32)  # cuts toward zero
    total = np.trunc(addend * np.ldexp(1.0, fraction - top))
    for first in range(0, len(whole), 16):
        total += whole[first : first + 16].sum(axis=0, dtype=np.int32)
    return np.ldexp(total, top - fraction)


def toward_zero(values: np.ndarray, fraction: int) -> np.ndarray:
    """float64 cut to so many fraction bits of fp32."""
    kept = (values.view(np.int64) & -(1 << (52 - fraction))).view(np.float64)
    found = kept.astype(np.float32)
    if np.count_nonzero(found.view(np.int32) & 0x7F000000) < found.size:  # some may be subnormal
        step = 2.0 ** (-126 - fraction)
        kept = np.where(np.abs(values) < 2.0**-126, np.trunc(values / step) * step, kept)
        found = kept.astype(np.float32)
    return found


def exact_sum(terms: np.ndarray, addend: np.ndarray) -> np.ndarray:
    """The sum in float64 rounded to odd: one more rounding, to fp32 or fp16, is then the only one.

    High and low parts together hold most sums; where they do not, fsum decides.
    """
    high, low, lost = addend, np.zeros_like(addend), np.zeros(addend.shape, bool)
    for term in terms:
        total = high + term
        error = two_sum_error(high, term, total)
        rest = low + error
        lost |= two_sum_error(low, error, rest) != 0
        high, low = total, rest
    finite = np.isfinite(high)
    rounded = two_sum_to_odd(high, low)
    for place in map(tuple, np.argwhere(lost & finite)):
        rounded[place] = _exact_element([addend[place], *terms[(slice(None), *place)]])
    return np.where(finite, rounded, high)


def _exact_element(terms: list[float]) -> float:
    total = math.fsum(terms)
    error = np.array(math.fsum([*terms, -total]))
    return float(two_sum_to_odd(np.array(total), error))
