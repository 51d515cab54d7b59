# mypy: ignore-errors
"""Elements in words as lists of fp32 values, sums and products of such lists, and back to words."""

from __future__ import annotations

import numpy as np
from cutlass import Float32, Uint32

from ...dtypes import BFLOAT16, FLOAT16, FLOAT32
from . import ptx

__all__ = ["add", "element", "fma", "multiply", "narrow", "tree_sum", "widen"]


def widen(words: list, dtype: np.dtype) -> list:
    """fp32 values of the elements in words; exact."""
    return [element(word, i, dtype) for word in words for i in range(4 // dtype.itemsize)]


def element(word, i: int, dtype: np.dtype):
    """fp32 value of element ``i`` of a word; exact."""
    if dtype == FLOAT16:
        return ptx.half_to_float(word, bool(i))
    if dtype == BFLOAT16:
        word = word & Uint32(0xFFFF0000) if i else word << 16
    return word.bitcast(Float32)


def narrow(values: list, dtype: np.dtype) -> list:
    """Words of fp32 values rounded to ``dtype``, to nearest even."""
    if dtype == FLOAT32:
        return [value.bitcast(Uint32) for value in values]
    kind = "bf16" if dtype == BFLOAT16 else "f16"
    return [ptx.round_pair(*values[i : i + 2], kind) for i in range(0, len(values), 2)]


def add(a: list, b: list, blackwell: bool) -> list:
    """Sums of two lists' items; Blackwell takes two at a time."""
    return _each(ptx.add, ptx.add_pairs if blackwell else None, a, b)


def multiply(a: list, b: list, blackwell: bool) -> list:
    """Products of two lists' items; Blackwell takes two at a time."""
    return _each(ptx.multiply, ptx.multiply_pairs if blackwell else None, a, b)


def fma(a: list, b: list, c: list, blackwell: bool) -> list:
    """``a * b + c`` of three lists' items, rounded once; Blackwell takes two at a time."""
    return _each(ptx.fma, ptx.fma_pairs if blackwell else None, a, b, c)


def tree_sum(values: list, blackwell: bool = False):
    """The sum of pairs side by side, of pairs of these, and so on."""
    while len(values) > 1:
        values = add(values[::2], values[1::2], blackwell)
    return values[0]


def _each(one, two, *lists: list) -> list:
    if two is None or len(lists[0]) % 2:
        return [one(*items) for items in zip(*lists, strict=True)]
    pairs = range(0, len(lists[0]), 2)
    return [v for i in pairs for v in two(*(items[i : i + 2] for items in lists))]
