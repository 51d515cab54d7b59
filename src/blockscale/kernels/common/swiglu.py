# mypy: ignore-errors
"""SwiGLU and its backward on CuTe DSL values: bit for bit ``reference.swiglu``.

Every operation is one of IEEE fp32, in the reference's order; see docs/numerics.md. A producer
takes words of each source and gives words of each part, of the same elements. Values come in lists,
since Blackwell computes two at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from cutlass import Float32, Uint32

from . import ptx
from .arithmetic import fma, multiply, narrow, widen

__all__ = ["PRODUCE"]

_LARGEST = 0x42B00F33  # 88.03: exp(-|g|) is at its smallest from there on
_MINUS_LOG2_E = 0xBFB8AA3B
_MAGIC = 0x4B400000  # 1.5 * 2^23, whose last bit is worth 1
_POLYNOMIAL = (0x3AAE5FA3, 0x3C1E7A05, 0x3D635ACB, 0x3E75FCD2, 0x3F317215, 0x3F800000)  # of 2^f


@dataclass(frozen=True)
class _Gate:
    """Of gates g: r = 1 / (1 + exp(-|g|)), t = g * exp(-|g|), c = exp(-|g|) if g < 0 else 1."""

    r: list
    t: list
    c: list
    silu: list


def _swiglu(values: list, blackwell: bool, narrowed, weights) -> tuple:
    gate, up = values
    made = multiply(_gate(gate, blackwell).silu, up, blackwell)
    if weights is not None:
        made = multiply(narrowed(made), weights, blackwell)
    return [made], None


def _swiglu_backward(values: list, blackwell: bool, narrowed, weights) -> tuple:
    gate, up, grad = values
    g, products = _gate(gate, blackwell), None
    if weights is not None:
        made = narrowed(multiply(g.silu, up, blackwell))
        products = multiply(grad, made, blackwell)
        grad = narrowed(multiply(grad, weights, blackwell))
    slope = multiply(g.r, fma(g.t, g.r, g.c, blackwell), blackwell)
    by_gate = multiply(multiply(grad, slope, blackwell), up, blackwell)
    return [by_gate, multiply(grad, g.silu, blackwell)], products


def _gate(gate: list, blackwell: bool) -> _Gate:
    e = _exp_minus_abs(gate, blackwell)
    t = multiply(gate, e, blackwell)
    one, minus_one = (_constant(bits, gate) for bits in (0x3F800000, 0xBF800000))
    minus_d = fma(e, minus_one, minus_one, blackwell)  # -(1 + e), from -2 to -1
    # 1 / d from an approximation within 1 ulp by one step of Newton's: what rcp.rn does for such d
    y = [ptx.reciprocal_of_minus(each) for each in minus_d]
    r = fma(y, fma(minus_d, y, one, blackwell), y, blackwell)
    c = [ptx.select_negative(*each) for each in zip(gate, e, one, strict=True)]
    largest = [ptx.maximum(*each) for each in zip(gate, t, strict=True)]
    return _Gate(r, t, c, multiply(largest, r, blackwell))


def _exp_minus_abs(gate: list, blackwell: bool) -> list:
    """2^n times a polynomial of the fraction f that is left; n is found by adding 1.5 * 2^23."""
    a = [ptx.magnitude_at_most(g, Uint32(_LARGEST).bitcast(Float32)) for g in gate]
    magic, minus_one = _constant(_MAGIC, gate), _constant(0xBF800000, gate)
    scale = _constant(_MINUS_LOG2_E, gate)
    z = fma(a, scale, magic, blackwell)
    f = fma(a, scale, fma(z, minus_one, magic, blackwell), blackwell)
    p = _constant(_POLYNOMIAL[0], gate)
    for bits in _POLYNOMIAL[1:]:
        p = fma(p, f, _constant(bits, gate), blackwell)
    pairs = zip(p, z, strict=True)
    return [(x.bitcast(Uint32) + (n.bitcast(Uint32) << 23)).bitcast(Float32) for x, n in pairs]


def _constant(bits: int, like: list) -> list:
    return [Uint32(bits).bitcast(Float32)] * len(like)


def _of_words(function):
    """``function`` of lists of fp32 values, for words of elements of a dtype."""

    def produce(sources: list, dtype: np.dtype, blackwell: bool, weights=None) -> tuple:
        def narrowed(values: list) -> list:
            return widen(narrow(values, dtype), dtype)

        values = [widen(words, dtype) for words in sources]
        made, products = function(values, blackwell, narrowed, weights)
        return [narrow(part, dtype) for part in made], products

    return produce


#: Words of each part, and products for the gradient of the row's weight, which has them summed up,
#: or None.
PRODUCE = {
    "swiglu": _of_words(_swiglu),
    "swiglu_backward": _of_words(_swiglu_backward),
    "weighted_swiglu": _of_words(_swiglu),
    "weighted_swiglu_backward": _of_words(_swiglu_backward),
}
