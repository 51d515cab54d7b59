"""dtypes as numpy has them (and JAX): what formats, configurations and kernel builders name.

numpy lacks those below 16 bits and bfloat16; ml_dtypes brings them, under the names that torch,
JAX and safetensors have too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import torch

__all__ = [
    "BFLOAT16",
    "FLOAT8_E4M3FN",
    "FLOAT8_E5M2",
    "FLOAT8_E8M0FNU",
    "FLOAT16",
    "FLOAT32",
    "INT32",
    "UINT8",
    "from_torch",
    "to_torch",
]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
FLOAT8_E4M3FN = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_E5M2 = np.dtype(ml_dtypes.float8_e5m2)
FLOAT8_E8M0FNU = np.dtype(ml_dtypes.float8_e8m0fnu)
UINT8 = np.dtype(np.uint8)
INT32 = np.dtype(np.int32)


def to_torch(dtype: np.dtype) -> torch.dtype:
    """The dtype of the same name in torch, which is imported here and not before."""
    import torch

    found: torch.dtype = getattr(torch, dtype.name)
    return found


def from_torch(dtype: torch.dtype) -> np.dtype:
    """numpy's dtype of the same name. Raises TypeError where numpy and ml_dtypes have none."""
    return np.dtype(str(dtype).removeprefix("torch."))
