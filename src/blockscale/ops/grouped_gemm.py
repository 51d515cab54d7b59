"""The op ``grouped_gemm``: one product a group of rows or of the contraction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..kernels.common.calls import Groups
from ..kernels.common.gpu import Unsupported
from . import gemm_cpu, gemm_kernels
from .backends import fall_back, no_cpu_kernels, on_cpu
from .dequantize import dequantize
from .gemm_operands import Side, scale_matrix
from .operation import operation

__all__ = ["grouped_gemm"]

_A_DATA, _B, _OFFSETS, _GROUPING = 0, slice(6, 12), 12, 13  # of its inputs


def _fake(
    a_data: Tensor,
    a_shape: list[int],
    b_shape: list[int],
    offsets: Tensor,
    grouping: str,
    out_dtype: torch.dtype,
) -> Tensor:
    lead = [offsets.shape[0]] if grouping == "k" else []
    return a_data.new_empty([*lead, a_shape[0], b_shape[-1]], dtype=out_dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    if inputs[_A_DATA].requires_grad:
        data, scale, scalar, *ctx.b = inputs[_B]
        ctx.masked = inputs[_GROUPING] == "masked"
        ctx.save_for_backward(data, scale, scalar, inputs[_OFFSETS])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Of a plain ``a``: quantized operands have no gradient."""
    gradients: list[Tensor | None] = [None] * 16
    if ctx.needs_input_grad[_A_DATA]:
        *parts, offsets = ctx.saved_tensors
        b = _values(Side(*parts, *ctx.b), -2, None)
        how = {"masked": ctx.masked, "out_dtype": torch.bfloat16}
        gradients[_A_DATA] = reference.grouped_gemm(grad, b.mT, offsets, **how)
    return tuple(gradients)


@operation(_fake, gradient=(_backward, _keep))
def grouped_gemm(
    a_data: Tensor,
    a_scale: Tensor | None,
    a_global: Tensor | None,
    a_format: str | None,
    a_layout: str,
    a_shape: list[int],
    b_data: Tensor,
    b_scale: Tensor,
    b_global: Tensor | None,
    b_format: str,
    b_layout: str,
    b_shape: list[int],
    offsets: Tensor,
    grouping: str,
    out_dtype: torch.dtype,
    backend: str = "auto",
) -> Tensor:
    """Products of ``a`` (M, K), blocked along -1, and ``b`` (..., K, N), blocked along -2.

    Scales of ``b`` are compact, and those of ``a`` where K is grouped. ``grouping``: "m", "k" or
    "masked", see reference.grouped_gemm.
    """
    k_grouped, masked = grouping == "k", grouping == "masked"
    a = Side(a_data, a_scale, a_global, a_format, a_layout, a_shape)
    b = Side(b_data, b_scale, b_global, b_format, b_layout, b_shape)
    if backend != "reference":
        try:
            if k_grouped:
                raise Unsupported("no kernel multiplies groups along K yet")
            if not on_cpu(a_data):
                return gemm_kernels.multiply_groups(a, b, Groups(offsets, masked), out_dtype)
            if not no_cpu_kernels():
                bounds = reference.bounds(offsets, a_shape[0], masked)
                return gemm_cpu.multiply_groups(a, b, bounds, out_dtype)
        except Unsupported as why:
            fall_back("grouped_gemm", a_data, backend, str(why))
    cut = offsets if k_grouped else None
    x, w = _values(a, -1, cut), _values(b, -2, cut)
    return reference.grouped_gemm(x, w, offsets, masked=masked, out_dtype=out_dtype)


def _values(side: Side, axis: int, offsets: Tensor | None) -> Tensor:
    """What an operand stands for; blocks start anew at ``offsets``, if they are given."""
    if side.format is None:
        return side.data
    scale = side.scale if side.layout == "compact" else scale_matrix(side, axis)
    assert scale is not None
    stored = side.data, scale, side.format, list(side.shape), axis, side.global_scale
    return dequantize(*stored, offsets, torch.float32)
