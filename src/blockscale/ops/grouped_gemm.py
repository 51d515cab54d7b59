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
from .dequantize import fp32_of
from .gemm import check_out, mark_written
from .gemm_operands import Side, scale_matrix
from .grouped_values import by_values, grouped_values
from .operation import operation

__all__ = ["grouped_gemm", "grouped_gemm_out"]

_A_DATA, _B, _OFFSETS, _GROUPING, _C = 0, slice(6, 12), 12, 13, 14  # of its inputs


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
    ctx.c = None if inputs[_C] is None else inputs[_C].dtype
    if inputs[_A_DATA].requires_grad:
        data, scale, scalar, *ctx.b = inputs[_B]
        ctx.masked = inputs[_GROUPING] == "masked"
        ctx.save_for_backward(data, scale, scalar, inputs[_OFFSETS])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Of a plain ``a``, and of c: quantized operands have no gradient."""
    gradients: list[Tensor | None] = [None] * 17
    if ctx.needs_input_grad[_A_DATA]:
        data, scale, scalar, offsets = ctx.saved_tensors
        name, _, (*lead, rows, columns) = ctx.b
        b = data.mT, scale.mT, scalar, name, [*lead, columns, rows], -1
        gradients[_A_DATA] = grouped_values(grad, *b, offsets, torch.bfloat16, ctx.masked)
    gradients[_C] = None if ctx.c is None else grad.to(ctx.c)
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
    c: Tensor | None,
    out_dtype: torch.dtype,
    backend: str = "auto",
) -> Tensor:
    """Products of ``a`` (M, K), blocked along -1, and ``b`` (..., K, N), blocked along -2, added
    to ``c`` where K is grouped.

    Scales of ``b`` are compact where rows are grouped. ``grouping``: "m", "k" or "masked", see
    reference.grouped_gemm.
    """
    a = Side(a_data, a_scale, a_global, a_format, a_layout, a_shape)
    b = Side(b_data, b_scale, b_global, b_format, b_layout, b_shape)
    out = None if c is None else c.to(out_dtype, copy=True)
    return _product(a, b, Groups(offsets, grouping), out, c is not None, out_dtype, backend)


def _fake_out() -> None:
    return None


@operation(_fake_out, mutates=("out",))
def grouped_gemm_out(
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
    out: Tensor,
    accumulate: bool,
    backend: str = "auto",
) -> None:
    """``grouped_gemm`` into ``out``, or added to it."""
    a = Side(a_data, a_scale, a_global, a_format, a_layout, a_shape)
    b = Side(b_data, b_scale, b_global, b_format, b_layout, b_shape)
    check_out(out, (a_data, a_scale, b_data, b_scale, None, offsets))
    mark_written(out)
    _product(a, b, Groups(offsets, grouping), out, accumulate, out.dtype, backend)


def _product(
    a: Side,
    b: Side,
    groups: Groups,
    out: Tensor | None,
    accumulate: bool,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """By a kernel where there is one, else by the reference."""
    offsets, k_grouped, masked = groups.offsets, groups.grouping == "k", groups.grouping == "masked"
    if backend != "reference":
        try:
            if not on_cpu(a.data):
                return gemm_kernels.multiply_groups(a, b, groups, out, accumulate, out_dtype)
            if k_grouped:
                raise Unsupported("no CPU kernel multiplies groups along K")
            if not no_cpu_kernels():
                bounds = reference.bounds(offsets, a.shape[0], masked)
                a = a._replace(scale=_compact(a, -1, groups), layout="compact")
                product = gemm_cpu.multiply_groups(a, b, bounds, out_dtype)
                return product if out is None else out.copy_(product)
        except Unsupported as why:
            fall_back("grouped_gemm", a.data, backend, str(why))
    rows = _values(a, -1, groups)
    if k_grouped:
        columns, c = _values(b, -2, groups), out if accumulate else None
        product = reference.grouped_gemm(rows, columns, offsets, out_dtype=out_dtype, c=c)
    else:
        bounds = reference.bounds(offsets, a.shape[0], masked)
        product = by_values(rows, b, -2, bounds, out_dtype)
    return product if out is None else out.copy_(product)


def _values(side: Side, axis: int, groups: Groups) -> Tensor:
    """What an operand stands for; blocks start anew in ``groups`` along K, if there are any."""
    if side.format is None:
        return side.data
    scale = _compact(side, axis, groups)
    assert scale is not None
    cuts = groups.offsets if groups.grouping == "k" else None
    return fp32_of(side, side.data, scale, list(side.shape), axis, cuts)


def _compact(side: Side, axis: int, groups: Groups) -> Tensor | None:
    """Scales of an operand, if it has any."""
    if side.layout == "compact":
        return side.scale
    matrix = scale_matrix(side, axis, groups)
    return matrix if axis == -1 else matrix.mT
