# mypy: ignore-errors
"""The DSL's types of torch's dtypes."""

from __future__ import annotations

import cutlass
import torch

__all__ = ["NUMERIC"]

NUMERIC = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
}
