"""The op ``grouped_values``: rows in groups, as they are, by the exact values of quantized
matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference
from ..stored import is_per_matrix
from .dequantize import dequantize
from .gemm_operands import Side
from .operation import operation

__all__ = ["by_values", "grouped_values"]


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
    masked: bool = False,
) -> Tensor:
    """``a[start:end] @ b[i]`` of each group, in fp32 sums: ``a`` (M, K) of any type, ``b``
    (G, K, N) with compact scales, blocked along either axis.

    ``masked``: as of reference.grouped_gemm. The ends of groups are read back from the device.
    """
    b = Side(b_data, b_scale, b_global, b_format, "compact", b_shape)
    return by_values(a, b, axis, reference.bounds(offsets, a.shape[0], masked), out_dtype)


def by_values(
    a: Tensor, b: Side, axis: int, bounds: Sequence[tuple[int, int]], out_dtype: torch.dtype
) -> Tensor:
    """The product of the rows of ``a`` within each of ``bounds`` by its matrix of ``b`` (G, K, N),
    whose scales are compact; zeros in other rows.

    One matrix is dequantized after the other, of those that have rows: a stack takes several times
    the memory in fp32.
    """
    assert b.format is not None
    assert b.scale is not None
    out = a.new_zeros(a.shape[0], b.shape[-1], dtype=out_dtype)
    each = is_per_matrix(b.global_scale, b.shape)
    for i, (start, end) in enumerate(bounds):
        if start < end:
            scalar = b.global_scale[i] if each and b.global_scale is not None else b.global_scale
            how = b.format, list(b.shape[1:]), axis, scalar, None, torch.float32
            values = dequantize(b.data[i], b.scale[i], *how)
            out[start:end] = reference.gemm(a[start:end], values, out_dtype=out_dtype)
    return out
