"""fp32 arithmetic, each operation rounded once to nearest even, in fp32 or in fp64.

XLA contracts a product and a sum into one operation, and flushes subnormals to zero. Formulas that
add, and serve JAX, too, take an :class:`Arithmetic`: both have the same bits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import NamedTuple

from .arrays import Array, namespace
from .rounding import FP32_INF, FP32_NAN, float32_bits, from_float32_bits

__all__ = ["IN_FP32", "IN_FP64", "Arithmetic"]

Operation = Callable[[Array, Array], Array]

_LOST = 52 - 23  # bits of a significand that fp32 has not
_HALF = 1 << (_LOST - 1)
_APART = (1023 - 127) << 52  # between biases of exponents, where fp64 has them
_MIN_NORMAL, _QUANTUM, _OVERFLOW = 2.0**-126, 2.0**-149, 2.0**128


class Arithmetic(NamedTuple):
    """Arrays that hold fp32 numbers, and operations on them.

    Attributes:
        of: the numbers of a float array.
        floats: its inverse, a float32 array.
        add_pairs: sums of neighbours along the last axis.
    """

    of: Callable[[Array], Array]
    floats: Callable[[Array], Array]
    add: Operation
    subtract: Operation
    multiply: Operation
    divide: Operation
    add_pairs: Callable[[Array], Array]


def _as_float32(x: Array) -> Array:
    xp = namespace(x)
    return xp.astype(x, xp.float32)


def _widened(x: Array) -> Array:
    """fp64 of a float array, by its bits: a conversion flushes subnormals, too."""
    xp, bits = namespace(x), float32_bits(x)
    magnitude = bits & 0x7FFFFFFF
    special = xp.where(magnitude >= FP32_INF, _APART, 0)
    normal = ((magnitude << _LOST) + _APART + special).view(xp.float64)
    subnormal = xp.astype(magnitude, xp.float64) * _QUANTUM
    found = xp.where(magnitude < 1 << 23, subnormal, normal)
    return xp.where(bits >> 31 == 1, -found, found)


def _narrowed(x: Array) -> Array:
    """float32 of fp64 numbers that fp32 has."""
    xp, size = namespace(x), namespace(x).abs(x)
    normal = xp.clip((size.view(xp.int64) - _APART) >> _LOST, max=FP32_INF)
    subnormal = xp.astype(size * (1 / _QUANTUM), xp.int64)
    found = xp.where(size < _MIN_NORMAL, subnormal, normal)
    found = xp.where(xp.isnan(x), FP32_NAN, found)
    return from_float32_bits(found | (xp.astype(xp.signbit(x), xp.int64) << 31))


def _rounded(exact: Array) -> Array:
    """fp64 rounded to what fp32 has; that is one rounding, as fp64 has more than twice the bits."""
    xp, bits = namespace(exact), exact.view(namespace(exact).int64)
    even = (bits >> _LOST) & 1
    normal = ((bits + (_HALF - 1) + even) & -(1 << _LOST)).view(xp.float64)
    subnormal = xp.round(exact * (1 / _QUANTUM)) * _QUANTUM
    found = xp.where(xp.abs(exact) < _MIN_NORMAL, subnormal, normal)
    found = xp.where(found >= _OVERFLOW, math.inf, found)
    return xp.where(found <= -_OVERFLOW, -math.inf, found)


def _reduced_pairs(x: Array) -> Array:
    """By a reduction, as XLA computes what is sliced anew for each slice."""
    xp = namespace(x)
    return _rounded(xp.sum(x.reshape((*x.shape[:-1], x.shape[-1] // 2, 2)), axis=-1))


#: By the processor: of torch and numpy, which do one operation after the other.
IN_FP32 = Arithmetic(
    of=_as_float32,
    floats=lambda x: x,
    add=operator.add,
    subtract=operator.sub,
    multiply=operator.mul,
    divide=operator.truediv,
    add_pairs=lambda x: x[..., ::2] + x[..., 1::2],
)

#: Rounded by integers, which no compiler takes for what it may leave out.
IN_FP64 = Arithmetic(
    of=_widened,
    floats=_narrowed,
    add=lambda a, b: _rounded(a + b),
    subtract=lambda a, b: _rounded(a - b),
    multiply=lambda a, b: _rounded(a * b),
    divide=lambda a, b: _rounded(a / b),
    add_pairs=_reduced_pairs,
)
