"""The ops ``gemm`` and ``gemm_out``: products of quantized operands.

Both take an operand as its parts: data (one-byte elements as uint8), scales in layout "compact",
"sm90" or "tcgen05", fp32 global scale, names of format and layout, shape. ``a`` may be a plain bf16
matrix: it has no scales and no format.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..kernels.common.gpu import Unsupported
from . import gemm_cpu, gemm_kernels
from .backends import fall_back, on_cpu
from .dequantize import values
from .gemm_operands import Side
from .operation import operation

__all__ = ["check_apart", "check_out", "gemm", "gemm_out", "mark_written", "span"]

_A_DATA, _BIAS, _C = 0, 12, 13  # inputs of ``gemm`` that may have a gradient
_B = slice(6, 12)

# Of a product: data and scales, bias, and what tells its groups, if there are any.
_INPUTS = ("a", "a", "b", "b", "bias", "offsets or counts")


def _fake(a_data: Tensor, a_shape: list[int], b_shape: list[int], out_dtype: torch.dtype) -> Tensor:
    return a_data.new_empty([a_shape[0], b_shape[1]], dtype=out_dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtypes = [None if inputs[i] is None else inputs[i].dtype for i in (_BIAS, _C)]
    if inputs[_A_DATA].requires_grad:
        data, scale, scalar, *ctx.b = inputs[_B]
        ctx.save_for_backward(data, scale, scalar)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Of a plain ``a``, of bias and of c: quantized operands have no gradient."""
    gradients: list[Tensor | None] = [None] * 16
    if ctx.needs_input_grad[_A_DATA]:
        b = values(Side(*ctx.saved_tensors, *ctx.b), -2)
        gradients[_A_DATA] = reference.gemm(grad, b.mT, out_dtype=torch.bfloat16)
    bias, c = ctx.dtypes
    gradients[_BIAS] = None if bias is None else grad.float().sum(0).to(bias)
    gradients[_C] = None if c is None else grad.to(c)
    return tuple(gradients)


@operation(_fake, gradient=(_backward, _keep))
def gemm(
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
    bias: Tensor | None,
    c: Tensor | None,
    out_dtype: torch.dtype,
    backend: str = "auto",
) -> Tensor:
    """``a @ b + bias + c``: ``a`` (M, K), blocked along -1, and ``b`` (K, N), blocked along -2."""
    a = Side(a_data, a_scale, a_global, a_format, a_layout, a_shape)
    b = Side(b_data, b_scale, b_global, b_format, b_layout, b_shape)
    out = None if c is None else c.to(out_dtype, copy=True)
    return _product(a, b, bias, out, c is not None, out_dtype, backend)


def _fake_out() -> None:
    return None


@operation(_fake_out, mutates=("out",))
def gemm_out(
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
    bias: Tensor | None,
    out: Tensor,
    accumulate: bool,
    backend: str = "auto",
) -> None:
    """``gemm`` into ``out``, or added to it."""
    a = Side(a_data, a_scale, a_global, a_format, a_layout, a_shape)
    b = Side(b_data, b_scale, b_global, b_format, b_layout, b_shape)
    check_out(out, (a_data, a_scale, b_data, b_scale, bias))
    mark_written(out)
    _product(a, b, bias, out, accumulate, out.dtype, backend)


def _product(
    a: Side,
    b: Side,
    bias: Tensor | None,
    out: Tensor | None,
    accumulate: bool,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """By a kernel where there is one, else by the reference."""
    if backend != "reference":
        multiply = gemm_cpu.multiply if on_cpu(a.data) else gemm_kernels.multiply
        try:
            return multiply(a, b, bias, out, accumulate, out_dtype)
        except Unsupported as why:
            fall_back("gemm", a.data, backend, str(why))
    c = out if accumulate else None
    product = reference.gemm(values(a, -1), values(b, -2), out_dtype=out_dtype, bias=bias, c=c)
    return product if out is None else out.copy_(product)


def check_out(out: Tensor, inputs: Sequence[Tensor | None]) -> None:
    """ValueError if what is written to ``out`` changes an input, or another element of ``out``."""
    spans = [span(x) if x is not None and x.device == out.device else 0 for x in inputs]
    check_apart(out, span(out), inputs, spans)
    _check_spread(out.shape, out.stride())


def check_apart(
    out: Tensor, out_span: int, inputs: Sequence[Tensor | None], spans: Sequence[int]
) -> None:
    """ValueError if ``out`` shares memory with one of ``inputs``, as many of ``_INPUTS``, or has
    none.

    ``spans``: of each input; 0 of those that are not there, or lie in another memory.
    """
    start = out.data_ptr()
    if out_span and not start:
        raise ValueError(
            f"out: the memory of this {tuple(out.shape)} tensor was freed; resize its storage, or "
            "pass another tensor"
        )
    end = start + out_span
    for name, x, n in zip(_INPUTS, inputs, spans, strict=False):
        if n and x is not None:
            other = x.data_ptr()
            if start < other + n and other < end:
                raise ValueError(f"out: shares memory with {name}; pass another tensor, or a copy")


def mark_written(out: Tensor) -> None:
    """Tell torch, which may not see it written."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def span(x: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if not x.numel():
        return 0
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.element_size() * (1 + last)


@lru_cache(maxsize=4096)
def _check_spread(shape: torch.Size, stride: tuple[int, ...]) -> None:
    """ValueError if elements of an output lie in the same place."""
    reach = 0
    for step, n in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if step <= reach:
            raise ValueError(f"out: has strides {stride}, its elements share memory: pass another")
        reach += step * (n - 1)
