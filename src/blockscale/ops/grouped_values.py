"""The op ``grouped_values``: rows in groups, as they are, by the exact values of quantized
matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..stored import is_per_matrix
from .dequantize import dequantize
from .operation import operation

__all__ = ["grouped_values"]


def _fake(a: Tensor, b_shape: list[int], out_dtype: torch.dtype) -> Tensor:
    return a.new_empty([a.shape[0], b_shape[-1]], dtype=out_dtype)


@operation(_fake)
def grouped_values(
    a: Tensor,
    b_data: Tensor,
    b_scale: Tensor,
    b_global: Tensor | None,
    b_format: str,
    b_shape: list[int],
    axis: int,
    offsets: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """``a[start:end] @ b[i]`` of each group, in fp32 sums: ``a`` (M, K) of any type, ``b``
    (G, K, N) with compact scales, blocked along either axis.

    One matrix is dequantized after the other, of those that have rows, so that no more than one is
    in high precision: the ends of groups are read back for that.
    """
    out = a.new_zeros(a.shape[0], b_shape[-1], dtype=out_dtype)
    each = is_per_matrix(b_global, b_shape)
    for i, (start, end) in enumerate(reference.bounds(offsets, a.shape[0])):
        if start < end:
            scalar = b_global[i] if each and b_global is not None else b_global
            stored = b_data[i], b_scale[i], b_format, b_shape[1:], axis, scalar, None
            values = dequantize(*stored, torch.float32)
            out[start:end] = reference.gemm(a[start:end], values, out_dtype=out_dtype)
    return out
