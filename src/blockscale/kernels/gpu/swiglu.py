# mypy: ignore-errors
"""SwiGLU and its backward on CuTe DSL values: bit for bit ``reference.swiglu``.

Every operation is one of IEEE fp32, in the reference's order; see docs/numerics.md. A producer
takes words of each source and gives words of each part, of the same elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from cutlass import Float32, Uint32

from . import ptx

__all__ = ["PRODUCE"]


@dataclass(frozen=True)
class _Gate:
    """Of a gate g: r = 1 / (1 + exp(-|g|)), t = g * exp(-|g|), c = exp(-|g|) if g < 0 else 1."""

    r: Any
    t: Any
    c: Any
    silu: Any


def _swiglu(gate, up) -> list:
    return [ptx.multiply(_gate(gate).silu, up)]


def _swiglu_backward(gate, up, grad) -> list:
    g = _gate(gate)
    slope = ptx.multiply(g.r, ptx.fma(g.t, g.r, g.c))
    return [ptx.multiply(ptx.multiply(grad, slope), up), ptx.multiply(grad, g.silu)]


def _gate(g) -> _Gate:
    e = ptx.exp_minus_abs(g)
    t = ptx.multiply(g, e)
    r = ptx.reciprocal(ptx.add(Float32(1.0), e))
    c = ptx.select_negative(g, e, Float32(1.0))
    return _Gate(r, t, c, ptx.multiply(ptx.maximum(g, t), r))


def _of_words(function):
    """``function`` of single fp32 values, for words of elements of a dtype."""

    def produce(sources: list, dtype: torch.dtype) -> list:
        values = [[v for word in words for v in widen(word, dtype)] for words in sources]
        made = [function(*each) for each in zip(*values, strict=True)]
        return [narrow(list(part), dtype) for part in zip(*made, strict=True)]

    return produce


def widen(word, dtype: torch.dtype) -> list:
    """fp32 values of a word's elements; exact."""
    if dtype == torch.float32:
        return [word.bitcast(Float32)]
    if dtype == torch.float16:
        return [ptx.half_to_float(word, upper) for upper in (False, True)]
    return [(word << 16).bitcast(Float32), (word & Uint32(0xFFFF0000)).bitcast(Float32)]


def narrow(values: list, dtype: torch.dtype) -> list:
    """Words of fp32 values, rounded to ``dtype``."""
    if dtype == torch.float32:
        return [value.bitcast(Uint32) for value in values]
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    return [ptx.round_pair(*values[i : i + 2], kind) for i in range(0, len(values), 2)]


PRODUCE = {"swiglu": _of_words(_swiglu), "swiglu_backward": _of_words(_swiglu_backward)}
