"""The sum of c and all products of one instruction, as a tensor core makes it or exact."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..ieee import two_sum_to_odd
from .factors import Factors

__all__ = ["Model", "aligned_sum", "exact_sum", "toward_zero"]


class Model(NamedTuple):
    """How a tensor core aligns the terms of a sum to the largest exponent among them and cuts them.

    Attributes:
        fraction: bits that are kept below the largest exponent.
        floor: the least exponent to align to.
        group: products that are summed exactly before they are aligned.
    """

    fraction: int
    floor: int
    group: int = 1


def aligned_sum(
    left: Factors, right: Factors, c: np.ndarray, smallest: int, model: Model
) -> np.ndarray:
    """The sum (..., M, N) in float64, of terms that are cut.

    left (..., M, K), right (..., N, K), c (..., M, N): of float32. smallest: the exponent of the
    smallest normal number of the type of c.
    """
    from . import loops  # numba is imported by the first product

    addend, columns = _batched(c), c.shape[-1]
    sums, (part, scale) = np.empty(addend.shape), np.empty((2, columns))
    loops.aligned(
        (_batched(left.values), _batched(left.exponents)),
        (_k_first(right.values), _k_first(right.exponents)),
        (addend, addend.view(np.int32)),
        smallest,
        tuple(model),  # which numba finds the compiled loop of sooner
        (np.empty(columns, np.float32), part, scale, scale.view(np.int64)),
        sums,
    )
    return sums.reshape(c.shape)


def exact_sum(left: Factors, right: Factors, c: np.ndarray) -> np.ndarray:
    """The sum (..., M, N) in float64 rounded to odd: one more rounding, to fp32 or fp16, is then
    the only one.

    High and low parts together hold most sums; where they do not, fsum decides.
    """
    from . import loops

    a, b, addend = _batched(left.values), _batched(right.values), _batched(c)
    high, low, lost = (np.empty(addend.shape, dtype) for dtype in (float, float, bool))
    loops.exact(a, _k_first(b), addend, high, low, lost)
    finite = np.isfinite(high)
    rounded = two_sum_to_odd(high, low)
    for i, m, n in np.argwhere(lost & finite).tolist():
        terms = a[i, m] * b[i, n]
        rounded[i, m, n] = _exact_element([float(addend[i, m, n]), *terms.tolist()])
    return np.where(finite, rounded, high).reshape(c.shape)


def _batched(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).reshape(-1, *rows.shape[-2:])


def _k_first(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(_batched(rows).swapaxes(1, 2))


def _exact_element(terms: list[float]) -> float:
    total = math.fsum(terms)
    error = np.array(math.fsum([*terms, -total]))
    return float(two_sum_to_odd(np.array(total), error))


def toward_zero(values: np.ndarray, fraction: int) -> np.ndarray:
    """float64 cut to so many fraction bits of fp32."""
    kept = (values.view(np.int64) & -(1 << (52 - fraction))).view(np.float64)
    found = kept.astype(np.float32)
    if np.count_nonzero(found.view(np.int32) & 0x7F000000) < found.size:  # some may be subnormal
        step = 2.0 ** (-126 - fraction)
        kept = np.where(np.abs(values) < 2.0**-126, np.trunc(values / step) * step, kept)
        found = kept.astype(np.float32)
    return found
