"""Every operation of the library as a torch.library op: schema, fake and choice of the backend.

The ops take and return plain tensors; the user functions wrap them in ScaledTensor. One-byte scales
go in and out as uint8, and so does data going in: much of torch (its compiler, opcheck) cannot work
with float8_e8m0fnu. On a CPU the
kernels of ``kernels.cpu`` run where numba is installed and the reference where it is not, or where
an argument (groups along the contraction, stochastic rounding) is known to the reference alone.
Both give the same bytes.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from . import reference
from .formats import get_format
from .layouts import Grouped, as_bytes, get_layout

__all__ = ["OPERATIONS", "backend", "cpu_backend"]

OPERATIONS = ("quantize", "global_scale", "dequantize", "gemm", "grouped_gemm")


@lru_cache
def cpu_backend() -> str:
    """ "numba" where the compiled CPU kernels can be used, else "reference"."""
    return "numba" if find_spec("numba") else "reference"


def backend(operation: str, device: str) -> tuple[str, str]:
    """(name, reason) of what runs ``operation`` on a device type, "cpu" or "cuda"."""
    if device != "cpu":
        return "reference", "plain torch on the device; its kernels are not part of this release"
    if cpu_backend() == "reference":
        return "reference", "numba is not installed: pip install numba for compiled kernels"
    if operation in ("gemm", "grouped_gemm"):
        return "numba + torch", "operands dequantized to fp32 by a kernel, multiplied by torch"
    if operation == "quantize":
        return "numba", "reference where seed= or groups along the contraction are asked for"
    return "numba", "compiled kernel, same bytes as the reference"


def _use_numba(x: Tensor) -> bool:
    return x.device.type == "cpu" and cpu_backend() == "numba"


@torch.library.custom_op("blockscale::quantize", mutates_args=())
def quantize(
    x: Tensor,
    format: str,
    axis: int,
    scale_rounding: str,
    nonfinite: str,
    layout: str,
    global_scale: Tensor | None = None,
    offsets: Tensor | None = None,
    k_grouped: bool = False,
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Data and scales of ``x``, scales in ``layout``; see reference.quantize."""
    fmt, cut = get_format(format), offsets if k_grouped else None
    if _use_numba(x) and cut is None and seed is None:
        from .kernels import cpu

        data, scale = cpu.quantize(
            x,
            fmt,
            axis=axis,
            scale_rounding=scale_rounding,
            nonfinite=nonfinite,
            global_scale=global_scale,
        )
    else:
        data, scale = reference.quantize(
            x,
            fmt,
            axis=axis,
            scale_rounding=scale_rounding,
            nonfinite=nonfinite,
            global_scale=global_scale,
            offsets=cut,
            seed=seed,
        )
    scale = as_bytes(scale)
    if layout == "compact":
        return data, scale
    matrix = scale if axis == -1 else scale.mT
    if offsets is not None:
        return data, Grouped(get_layout(layout)).swizzle(matrix, offsets)
    return data, get_layout(layout).swizzle(matrix)


@quantize.register_fake
def _(
    x: Tensor,
    format: str,
    axis: int,
    scale_rounding: str,
    nonfinite: str,
    layout: str,
    global_scale: Tensor | None = None,
    offsets: Tensor | None = None,
    k_grouped: bool = False,
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    fmt = get_format(format)
    groups = offsets.shape[0] if offsets is not None else 0
    k_groups = groups if k_grouped else 0
    data_shape = fmt.data_shape(x.shape, axis, k_groups)
    if axis == -2 and fmt.element.bits < 8:
        flipped = (*data_shape[:-2], data_shape[-1], data_shape[-2])
        data = x.new_empty(flipped, dtype=fmt.element.dtype).mT
    else:
        data = x.new_empty(data_shape, dtype=fmt.element.dtype)
    shape = fmt.scale_shape(x.shape, axis, k_groups)
    scale_dtype = torch.uint8 if fmt.scale.nbytes == 1 else fmt.scale.dtype
    if layout == "compact":
        return data, x.new_empty(shape, dtype=scale_dtype)
    matrix = (shape[0], shape[1]) if axis == -1 else (shape[1], shape[0])
    where = get_layout(layout)
    stored = (
        where.stored_shape(matrix)
        if offsets is None
        else Grouped(where).stored_shape(matrix, groups)
    )
    return data, x.new_empty(stored, dtype=where.stored_dtype(scale_dtype))


@torch.library.custom_op("blockscale::global_scale", mutates_args=())
def global_scale(x: Tensor, format: str) -> Tensor:
    """fp32 scalar for a format with two levels of scales; see reference.global_scale."""
    if _use_numba(x):
        from .kernels import cpu

        return cpu.global_scale(x, get_format(format))
    return reference.global_scale(x, get_format(format))


@global_scale.register_fake
def _(x: Tensor, format: str) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


@torch.library.custom_op("blockscale::dequantize", mutates_args=())
def dequantize(
    data: Tensor,
    scale: Tensor,
    format: str,
    shape: list[int],
    axis: int,
    global_scale: Tensor | None,
    offsets: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Values of quantized data with compact scales; ``offsets`` cut the contraction."""
    fmt, size = get_format(format), torch.Size(shape)
    if _use_numba(data) and offsets is None:
        from .kernels import cpu

        out = cpu.dequantize(
            data, scale, fmt, shape=size, axis=axis, global_scale=global_scale, dtype=dtype
        )
        return out.contiguous()
    out = reference.dequantize(
        data, scale, fmt, shape=size, axis=axis, global_scale=global_scale, offsets=offsets
    )
    return out.to(dtype).contiguous()


@dequantize.register_fake
def _(
    data: Tensor,
    scale: Tensor,
    format: str,
    shape: list[int],
    axis: int,
    global_scale: Tensor | None,
    offsets: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return data.new_empty(shape, dtype=dtype)


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
