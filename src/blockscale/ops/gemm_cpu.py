"""Products on a CPU: a few rows by one compiled loop; more by torch, of what a loop dequantizes."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..kernels import cpu
from .backends import require_cpu_kernels
from .dequantize import values
from .gemm_operands import Side, scale_matrix

__all__ = ["multiply"]


def multiply(
    a: Side,
    b: Side,
    bias: Tensor | None,
    out: Tensor | None,
    accumulate: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """``a @ b + bias``, in ``out`` if that is given; Unsupported where numba is not installed."""
    require_cpu_kernels()
    weight = b.data.mT
    if 0 < a.shape[0] <= cpu.MAX_SKINNY_M and weight.is_contiguous():
        scale = scale_matrix(b, -2)
        acc = cpu.multiply(values(a, -1), weight, scale, b.kind, global_scale=b.global_scale)
    else:
        acc = reference.gemm(values(a, -1), values(b, -2))
    product = reference.epilogue(acc, out_dtype, bias, out if accumulate else None)
    return product if out is None else out.copy_(product)
