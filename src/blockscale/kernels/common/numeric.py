# mypy: ignore-errors
"""The DSL's types of dtypes."""

from __future__ import annotations

import cutlass

from ...dtypes import BFLOAT16, FLOAT16, FLOAT32

__all__ = ["NUMERIC"]

NUMERIC = {
    BFLOAT16: cutlass.BFloat16,
    FLOAT16: cutlass.Float16,
    FLOAT32: cutlass.Float32,
}
