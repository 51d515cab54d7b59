"""The op ``grouped_gemm``: one product a group of rows or of the contraction."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..kernels.common.gpu import Unsupported
from . import gemm_cpu, gemm_kernels
from .backends import fall_back, no_cpu_kernels, on_cpu
from .dequantize import dequantize
from .gemm_operands import Side, scale_matrix
from .operation import operation

__all__ = ["grouped_gemm"]


def _fake(
    a_data: Tensor,
    a_shape: list[int],
    b_shape: list[int],
    offsets: Tensor,
    k_grouped: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    shape = [a_shape[0], b_shape[-1]]
    return a_data.new_empty([offsets.shape[0], *shape] if k_grouped else shape, dtype=out_dtype)


@operation(_fake)
def grouped_gemm(
    a_data: Tensor,
    a_scale: Tensor,
    a_global: Tensor | None,
    a_format: str,
    a_layout: str,
    a_shape: list[int],
    b_data: Tensor,
    b_scale: Tensor,
    b_global: Tensor | None,
    b_format: str,
    b_layout: str,
    b_shape: list[int],
    offsets: Tensor,
    k_grouped: bool,
    out_dtype: torch.dtype,
    backend: str = "auto",
) -> Tensor:
    """Products of ``a`` (M, K), blocked along -1, and ``b`` (..., K, N), blocked along -2.

    Scales of ``b`` are compact, and those of ``a`` where K is grouped. See reference.grouped_gemm.
    """
    a = Side(a_data, a_scale, a_global, a_format, a_layout, a_shape)
    b = Side(b_data, b_scale, b_global, b_format, b_layout, b_shape)
    if backend != "reference":
        try:
            if k_grouped:
                raise Unsupported("no kernel multiplies groups along K yet")
            if not on_cpu(a_data):
                return gemm_kernels.multiply_groups(a, b, offsets, out_dtype)
            if not no_cpu_kernels():
                return gemm_cpu.multiply_groups(a, b, [0, *offsets.tolist()], out_dtype)
        except Unsupported as why:
            fall_back("grouped_gemm", a_data, backend, str(why))
    cut, f32 = offsets if k_grouped else None, torch.float32
    a_scale = scale_matrix(a, -1)
    x = dequantize(a_data, a_scale, a_format, a_shape, -1, a_global, cut, f32)
    w = dequantize(b_data, b_scale, b_format, b_shape, -2, b_global, cut, f32)
    return reference.grouped_gemm(x, w, offsets, out_dtype=out_dtype)
