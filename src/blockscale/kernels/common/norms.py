# mypy: ignore-errors
"""RMSNorm and LayerNorm of elements, given the statistics of their rows: bit for bit
``reference.rmsnorm`` and ``reference.layernorm``, as producers (see ``swiglu``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from cutlass import Float32, select_

from .arithmetic import add, multiply, narrow, widen

__all__ = ["NORMALIZE", "Factors"]


@dataclass(frozen=True)
class Factors:
    """What elements of one row, which come together, are made of.

    Attributes:
        rstd, minus_mean: of the row.
        weight, bias: of their columns.
        inside: of each, whether it is of the tensor; others become zeros.
    """

    rstd: Any
    minus_mean: Any
    weight: list
    bias: list | None
    inside: list


def _normalize(sources: list, dtype: np.dtype, blackwell: bool, by: Factors) -> tuple:
    values = widen(sources[0], dtype)
    count = len(values)
    if by.minus_mean is not None:
        values = add(values, [by.minus_mean] * count, blackwell)
    values = multiply(multiply(values, [by.rstd] * count, blackwell), by.weight, blackwell)
    if by.bias is not None:
        values = add(values, by.bias, blackwell)
    pairs = zip(values, by.inside, strict=True)
    values = [Float32(select_(known, value, Float32(0.0))) for value, known in pairs]
    return [narrow(values, dtype)], None


#: Words of the part, and no products, as ``swiglu.PRODUCE``.
NORMALIZE = dict.fromkeys(("rmsnorm", "layernorm", "biased_layernorm"), _normalize)
