"""Products on a CPU: a few rows by one compiled loop; more by torch, of what a loop dequantizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference
from ..kernels.cpu import calls as cpu
from ..stored import is_per_group
from .backends import require_cpu_kernels
from .dequantize import values
from .gemm_operands import Side, scale_matrix

__all__ = ["multiply", "multiply_groups"]


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


def multiply_groups(
    a: Side, b: Side, bounds: Sequence[tuple[int, int]], out_dtype: torch.dtype
) -> Tensor:
    """Rows of ``a`` (M, K) between the ``bounds[i]`` by ``b[i]`` (K, N), each group with the bits
    of a product of its own; other rows are zero."""
    rows, (_, k, n) = values(a, -1), b.shape
    out = torch.zeros(a.shape[0], n, dtype=out_dtype)
    assert b.scale is not None
    scalars: Sequence[Tensor | None] = [b.global_scale] * len(bounds)
    if is_per_group(b.global_scale):
        scalars = b.global_scale.unbind()
    for data, scale, scalar, (start, end) in zip(b.data, b.scale, scalars, bounds, strict=True):
        if start < end:
            group = Side(rows[start:end], None, None, None, "compact", (end - start, k))
            expert = b._replace(data=data, scale=scale, global_scale=scalar, shape=(k, n))
            multiply(group, expert, None, out[start:end], False, out_dtype)
    return out
