"""The op ``gemm``: plain and grouped products of quantized operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from .dequantize import dequantize

__all__ = ["gemm"]


@torch.library.custom_op("blockscale::gemm", mutates_args=())
def gemm(
    a_data: Tensor,
    a_scale: Tensor,
    a_global: Tensor | None,
    a_format: str,
    a_shape: list[int],
    b_data: Tensor,
    b_scale: Tensor,
    b_global: Tensor | None,
    b_format: str,
    b_shape: list[int],
    bias: Tensor | None,
    c: Tensor | None,
    offsets: Tensor | None,
    k_grouped: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Product of ``a`` (M, K), blocked along -1, and ``b`` (..., K, N), blocked along -2.

    Scales are compact. With ``offsets`` grouped, see reference.grouped_gemm.
    """
    cut = offsets if k_grouped else None
    f32 = torch.float32
    a = dequantize(a_data, a_scale, a_format, a_shape, -1, a_global, cut, f32)
    b = dequantize(b_data, b_scale, b_format, b_shape, -2, b_global, cut, f32)
    if offsets is None:
        return reference.gemm(a, b, out_dtype=out_dtype, bias=bias, c=c)
    return reference.grouped_gemm(a, b, offsets, out_dtype=out_dtype)


@gemm.register_fake
def _(
    a_data: Tensor,
    a_scale: Tensor,
    a_global: Tensor | None,
    a_format: str,
    a_shape: list[int],
    b_data: Tensor,
    b_scale: Tensor,
    b_global: Tensor | None,
    b_format: str,
    b_shape: list[int],
    bias: Tensor | None,
    c: Tensor | None,
    offsets: Tensor | None,
    k_grouped: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    shape = [a_shape[0], b_shape[-1]]
    if offsets is not None and k_grouped:
        shape = [offsets.shape[0], *shape]
    return a_data.new_empty(shape, dtype=out_dtype)


def _gemm_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    bias, c = inputs[10], inputs[11]
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.c_dtype = None if c is None else c.dtype


def _gemm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """bias and c are the only differentiable inputs: quantized operands have no gradient."""
    bias = None if ctx.bias_dtype is None else grad.float().sum(0).to(ctx.bias_dtype)
    c = None if ctx.c_dtype is None else grad.to(ctx.c_dtype)
    return (*[None] * 10, bias, c, None, None, None)


gemm.register_autograd(_gemm_backward, setup_context=_gemm_context)
