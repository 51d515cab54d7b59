"""The operands of a product by tensor cores, and the terms of its sums.

Terms are float64, or float32 where that holds them exactly, and made in blocks that stay in the
cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .elements import NO_EXPONENT, decode, lowest_bits

__all__ = ["Operand", "narrowed", "operand", "terms_of"]

_BLOCK = 1 << 19  # bytes of products at a time: they stay in the cache
_NARROW = 64  # bits from the highest to the lowest one of any product, where float32 is used
_SPARSE = 8  # fewer elements than one of so many are looked up one by one


@dataclass(frozen=True, slots=True)
class Operand:
    values: np.ndarray  # (..., rows, K) float64, scaled
    exponents: np.ndarray  # (..., rows, K / group) int16: what the terms are aligned by
    lowest: np.ndarray  # (..., rows) int16: of the lowest bit of any value


def operand(
    codes: np.ndarray,
    type: str,
    scales: np.ndarray | None,
    scale_type: str,
    vector: int,
    group: int,
) -> Operand:
    values, exponents = decode(codes, type)
    lowest = lowest_bits(codes, type)
    if scales is None:
        return Operand(values, exponents, lowest.min(axis=-1))
    scale, scale_exponents = decode(scales, scale_type)
    blocks = (*scales.shape, vector)  # (..., rows, K / vector, vector)
    values = (values.reshape(blocks) * scale[..., None]).reshape(values.shape)
    lowest = lowest.reshape(blocks).min(axis=-1) + lowest_bits(scales, scale_type)
    if group == 1:
        exponents = exponents.reshape(blocks) + scale_exponents[..., None]
        exponents = exponents.reshape(values.shape)
    else:
        exponents = np.repeat(scale_exponents, vector // group, axis=-1)
    return Operand(values, exponents, lowest.min(axis=-1))


def narrowed(left: Operand, right: Operand) -> tuple[Operand, Operand, np.ndarray | None]:
    """The operands in float32, and by what power of two (..., M, N) their products are then to be
    multiplied; as they are, and None, where float32 could not hold a product.

    Values have 11 bits at most, so that products have 22.
    """
    narrow, shifts, reach = [], [], 0
    for each in (left, right):
        highest = each.exponents.max(axis=-1).astype(np.int32)
        shift = np.where(highest > NO_EXPONENT // 2, highest, 0)
        reach += min(int((each.lowest - shift).min()), 0)  # of zeros it is far above
        values = each.values * (1023 - shift.astype(np.int64) << 52).view(np.float64)[..., None]
        narrow.append(replace(each, values=values.astype(np.float32)))
        shifts.append(shift)
    if reach < -_NARROW or not all(np.isfinite(each.values).all() for each in (left, right)):
        return left, right, None
    return narrow[0], narrow[1], shifts[0][..., None] + shifts[1][..., None, :]


def _parts(shape: tuple[int, ...], size: int) -> Iterator[tuple[slice, ...]]:
    """Slices of D (..., M, N), whose elements have ``size`` bytes of products each, of about
    ``_BLOCK`` bytes: rows, or whole instructions."""
    *batch, rows, columns = shape
    step = max(1, _BLOCK // max(1, columns * size))
    whole = max(1, step // max(1, rows))
    for first in range(0, batch[0] if batch else 1, whole):
        for start in range(0, rows, step):
            yield (*(slice(first, first + whole) for _ in batch), slice(start, start + step))


def terms_of(
    left: Operand, right: Operand, wanted: np.ndarray, group: int
) -> Iterator[tuple[np.ndarray, np.ndarray, Any]]:
    """Terms (K / group, n) of the wanted elements of D at least, the largest exponent (n,) among
    those not zero, and the place (n,) in D; n is one dimension, or those of a part of D."""
    size = left.values.shape[-1] * left.values.itemsize
    if group == 1 and np.count_nonzero(wanted) * _SPARSE < wanted.size:
        places = np.unravel_index(np.flatnonzero(wanted), wanted.shape)
        for start in range(0, len(places[0]), _BLOCK // size):
            place = tuple(index[start : start + _BLOCK // size] for index in places)
            of_a, of_b = place[:-1], (*place[:-2], place[-1])
            exponents = left.exponents[of_a] + right.exponents[of_b]
            yield (left.values[of_a] * right.values[of_b]).T, exponents.max(axis=-1), place
        return
    if not wanted.any():
        return
    one, other = ((_k_first(each.values), _k_first(each.exponents)) for each in (left, right))
    for part in _parts(wanted.shape, size):
        if wanted[part].any():
            yield *_outer(one, part, other, group), part


def _k_first(table: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(table, -1, 0))


def _outer(
    left: tuple[np.ndarray, np.ndarray], part: tuple[slice, ...],
    right: tuple[np.ndarray, np.ndarray], group: int,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Terms (K / group, ..., m, N) and the largest exponent (..., m, N) among those not zero, of
    values and exponents, K first."""
    of_a, of_b = (slice(None), *part), (slice(None), *part[:-1])
    values, others = left[0][of_a], right[0][of_b]
    exponents = left[1][of_a][..., None] + right[1][of_b][..., None, :]
    if group == 1:
        # Twice as quick as a product of views that are broadcast.
        return np.einsum("k...m,k...n->k...mn", values, others), exponents.max(axis=0)
    one, other = (  # (K / group, ..., group, rows)
        each.reshape(-1, group, *each.shape[1:]).swapaxes(1, -2) for each in (values, others)
    )
    one = one.swapaxes(-1, -2)
    products = (one != 0).astype(np.float32) @ (other != 0).astype(np.float32)
    # Products that cancel still count.
    return one @ other, np.where(products > 0, exponents, NO_EXPONENT).max(axis=0)
