# mypy: ignore-errors
"""The DSL's types of dtypes, and a NaN of any of them."""

from __future__ import annotations

import cutlass

from ...dtypes import BFLOAT16, FLOAT16, FLOAT32

__all__ = ["NAN_WORD", "NUMERIC"]

NAN_WORD = 0x7FFF7FFF  # of fp32, and two of half its size

NUMERIC = {
    BFLOAT16: cutlass.BFloat16,
    FLOAT16: cutlass.Float16,
    FLOAT32: cutlass.Float32,
}
