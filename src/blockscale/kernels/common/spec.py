"""A format, a scale rounding and a policy for NaN as the integers that every kernel needs."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...formats import E8M0, FP32, Format
from ...rounding import MANTISSA_LIMIT

__all__ = ["NEAREST_FP32", "NEAREST_UE4M3", "POWER_OF_TWO", "Spec", "specify"]

POWER_OF_TWO, NEAREST_FP32, NEAREST_UE4M3 = 0, 1, 2


class Spec(NamedTuple):
    """A format, a scale rounding and a policy for NaN, as the integers that kernels need."""

    # the element
    mantissa_bits: int
    bias: int
    bits: int
    max_code: int
    max_bits: int  # of the largest value, as fp32
    nan_code: int  # of one NaN; the largest code where the element has none
    block_nan_code: int  # of every element of a block with a NaN under "propagate"
    # the scale
    kind: int  # POWER_OF_TWO, NEAREST_FP32 or NEAREST_UE4M3
    limit: int  # largest mantissa of amax that is not rounded up to the next power of two
    max_exponent: int  # of the element
    min_byte: int  # of a power of two
    shift: int  # a power of two is stored as byte << shift
    scale_nan: int
    scale_max: int
    propagate: int


@lru_cache
def specify(format: Format, scale_rounding: str, nonfinite: str) -> Spec:
    """The constants of a format; ``scale_rounding`` is one of ``format.scale.roundings``."""
    element, scale = format.element, format.scale
    power_of_two = scale is E8M0 or scale_rounding != "nearest"
    return Spec(
        mantissa_bits=element.mantissa_bits,
        bias=element.bias,
        bits=element.bits,
        max_code=element.max_code,
        max_bits=int(np.float32(element.max).view(np.int32)),
        nan_code=element.max_code if element.nan_code is None else element.nan_code,
        block_nan_code=element.nan_code or 0,
        kind=POWER_OF_TWO if power_of_two else NEAREST_FP32 if scale is FP32 else NEAREST_UE4M3,
        limit=MANTISSA_LIMIT[scale_rounding](element) if power_of_two else 0,
        max_exponent=element.max_exponent,
        min_byte=1 if scale is FP32 else 0,
        shift=23 if scale is FP32 else 0,
        scale_nan=scale.nan_code,
        scale_max=scale.max_code,
        propagate=int(nonfinite == "propagate"),
    )
