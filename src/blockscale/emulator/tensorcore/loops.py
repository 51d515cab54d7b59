# mypy: ignore-errors
"""The loops over the products of a sum, compiled: rows of D are vectors.

A is (batch, M, K), B is (batch, K, N); c and the sums are (batch, M, N). One row's scratch comes
from the caller.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ... import jit
from .. import ieee

__all__ = ["aligned", "exact"]

_cached = jit.cached([Path(each) for each in (__file__, jit.__file__, ieee.__file__)])
_two_sum_error = jit.spliced(ieee.two_sum_error)


@jit.inlined
def _largest_exponent(top, row, columns):
    """Raise top[n] to the largest exponent of row * columns; K is a multiple of 4."""
    for k in range(0, row.shape[0], 4):
        first, second, third, fourth = row[k], row[k + 1], row[k + 2], row[k + 3]
        for n in range(top.shape[0]):
            one = max(first + columns[k, n], second + columns[k + 1, n])
            other = max(third + columns[k + 2, n], fourth + columns[k + 3, n])
            top[n] = max(top[n], one, other)


@jit.inlined
def _add_products(total, row, columns, scale):
    """Add each product, scaled and cut. Sums of a few integers are exact in any order."""
    for k in range(0, row.shape[0], 4):
        first, second, third, fourth = row[k], row[k + 1], row[k + 2], row[k + 3]
        for n in range(total.shape[0]):
            one = np.trunc(first * columns[k, n] * scale[n])
            one += np.trunc(second * columns[k + 1, n] * scale[n])
            other = np.trunc(third * columns[k + 2, n] * scale[n])
            other += np.trunc(fourth * columns[k + 3, n] * scale[n])
            total[n] += one + other


@jit.inlined
def _add_groups(total, row, columns, scale, group, part):
    """Add the sum of each group of products, scaled and cut."""
    for first in range(0, row.shape[0], group):
        for n in range(total.shape[0]):
            part[n] = row[first] * columns[first, n]
        for k in range(first + 1, first + group):
            value = row[k]
            for n in range(total.shape[0]):
                part[n] += value * columns[k, n]
        for n in range(total.shape[0]):
            total[n] += np.trunc(part[n] * scale[n])


@_cached
def aligned(left, right, addend, smallest, model, row, sums):
    """Each ``group`` of products summed, cut toward zero at ``fraction`` bits below the largest
    exponent of the element, and summed with c.

    left, right: values of A and B in float64, and their exponents in float32. addend: c in float32,
    and the same bits as int32. smallest: exponent of the smallest normal c. model: a
    sums.Model, as a plain tuple. row: (N,) of float32, float64, float64, and the same memory as
    int64.
    """
    a, a_exponents = left
    b, b_exponents = right
    c, c_bits = addend
    top, part, scale, scale_bits = row
    fraction, floor, group = model
    least, lowest = np.float32(smallest), np.float32(floor)
    for i in range(a.shape[0]):
        for m in range(a.shape[1]):
            total = sums[i, m]
            for n in range(b.shape[2]):
                exponent = np.float32((c_bits[i, m, n] >> 23 & 0xFF) - 127)
                top[n] = max(exponent, least, lowest) if c[i, m, n] != 0 else lowest
            _largest_exponent(top, a_exponents[i, m], b_exponents[i])
            for n in range(b.shape[2]):
                scale_bits[n] = np.int64(1023 + fraction - top[n]) << 52
            for n in range(b.shape[2]):
                total[n] = np.trunc(c[i, m, n] * scale[n])
            if group == 1:
                _add_products(total, a[i, m], b[i], scale)
            else:
                _add_groups(total, a[i, m], b[i], scale, group, part)
            for n in range(b.shape[2]):
                scale_bits[n] = np.int64(1023 - fraction + top[n]) << 52
            for n in range(b.shape[2]):
                total[n] *= scale[n]


@_cached
def exact(a, b, c, high, low, lost):
    """The sum of c and all products in two parts, and whether something is in neither."""
    for i in range(a.shape[0]):
        for m in range(a.shape[1]):
            upper, lower, rest = high[i, m], low[i, m], lost[i, m]
            for n in range(b.shape[2]):
                upper[n], lower[n], rest[n] = c[i, m, n], 0, False
            for k in range(a.shape[2]):
                value = a[i, m, k]
                for n in range(b.shape[2]):
                    term = value * b[i, k, n]
                    total = upper[n] + term
                    error = _two_sum_error(upper[n], term, total)
                    both = lower[n] + error
                    rest[n] |= _two_sum_error(lower[n], error, both) != 0
                    upper[n], lower[n] = total, both
