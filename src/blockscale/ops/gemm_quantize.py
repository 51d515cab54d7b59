"""The ops ``gemm_quantize`` and ``grouped_gemm_quantize``: products that are quantized for the next
ones.

One kernel where there is one that multiplies and quantizes, else ``gemm`` to fp32 and a quantizer,
each by a kernel if it has one. Nothing is rounded in between, unless it is asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import get_format
from ..kernels.common.calls import Groups
from ..kernels.common.gpu import Unsupported
from ..kernels.quantizers import calls as quantizers
from ..layouts import Grouped, get_layout, swizzle_scale
from . import fakes
from .fused import fake_scalar, quantize_values, swiglu_quantize
from .gemm import gemm
from .gemm_kernels import multiply_quantized
from .gemm_operands import Quantization, Side, inside
from .grouped_gemm import grouped_gemm
from .operation import operation

__all__ = ["gemm_quantize", "grouped_gemm_quantize"]


def _fake(
    a_data: Tensor,
    a_shape: list[int],
    b_shape: list[int],
    format: str,
    swiglu: bool,
    layout: str,
    global_scale: Tensor | None,
) -> list[Tensor]:
    return _unwritten(a_data, (a_shape[0], b_shape[1]), format, swiglu, layout, global_scale)


def _fake_groups(
    a_data: Tensor,
    a_shape: list[int],
    b_shape: list[int],
    offsets: Tensor,
    format: str,
    swiglu: bool,
    layout: str,
    global_scale: Tensor | None,
) -> list[Tensor]:
    product = a_shape[0], b_shape[2]
    return _unwritten(a_data, product, format, swiglu, layout, global_scale, offsets)


def _unwritten(
    like: Tensor,
    product: tuple[int, int],
    format: str,
    swiglu: bool,
    layout: str,
    global_scale: Tensor | None,
    offsets: Tensor | None = None,
) -> list[Tensor]:
    rows, columns = product
    values = like.new_empty([rows, columns // (1 + swiglu)], dtype=torch.float32)
    fmt = get_format(format)
    return [*fakes.empty(values, fmt, -1, layout, offsets), *fake_scalar(values, fmt, global_scale)]


@operation(_fake)
def gemm_quantize(
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
    format: str,
    swiglu: bool,
    scale_rounding: str,
    nonfinite: str,
    layout: str,
    global_scale: Tensor | None = None,
    backend: str = "auto",
) -> list[Tensor]:
    """Data and scales of ``a @ b + bias``, or of SwiGLU of it, blocked along -1; last the global
    scale, where it is found here. Operands are those of ``gemm``.
    """
    a = a_data, a_scale, a_global, a_format, a_layout, a_shape
    b = b_data, b_scale, b_global, b_format, b_layout, b_shape
    if backend != "reference":
        how = Quantization(format, swiglu, scale_rounding, nonfinite, global_scale)
        try:
            return _by_one_kernel(Side(*a), Side(*b), bias, how, layout)
        except Unsupported:
            pass  # what one kernel cannot, two may; these say what they cannot
    values = gemm(*a, *b, bias, None, torch.float32, backend)
    if swiglu:
        asked = format, True, False, scale_rounding, nonfinite, layout, layout
        return swiglu_quantize(values, None, *asked, global_scale, None, backend)
    rounding = quantizers.Request(format, (-1,), (layout,), scale_rounding, nonfinite)
    return quantize_values(values, rounding, global_scale, None, backend)


@operation(_fake_groups)
def grouped_gemm_quantize(
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
    format: str,
    swiglu: bool,
    rounded: bool,
    scale_rounding: str,
    nonfinite: str,
    layout: str,
    global_scale: Tensor | None = None,
    backend: str = "auto",
) -> list[Tensor]:
    """``gemm_quantize`` of the product of each group of rows, ``rounded`` to bfloat16 before, or
    not. Operands are those of ``grouped_gemm``.
    """
    a = a_data, a_scale, a_global, a_format, a_layout, a_shape
    b = b_data, b_scale, b_global, b_format, b_layout, b_shape
    if backend != "reference":
        how = Quantization(format, swiglu, scale_rounding, nonfinite, global_scale, rounded)
        try:
            return _by_one_kernel(Side(*a), Side(*b), None, how, layout, offsets)
        except Unsupported:
            pass  # as above
    dtype = torch.bfloat16 if rounded else torch.float32
    values = grouped_gemm(*a, *b, offsets, "m", None, dtype, backend)
    if swiglu:
        asked = format, True, False, scale_rounding, nonfinite, layout, layout
        return swiglu_quantize(values, None, *asked, global_scale, offsets, backend)
    grouped = get_layout(layout).spreads
    of = format, (-1,), (layout,), scale_rounding, nonfinite, "load", grouped
    offsets_of = offsets if grouped else None
    return quantize_values(values, quantizers.Request(*of), global_scale, offsets_of, backend)


def _by_one_kernel(
    a: Side,
    b: Side,
    bias: Tensor | None,
    how: Quantization,
    layout: str,
    offsets: Tensor | None = None,
) -> list[Tensor]:
    groups = None if offsets is None else Groups(offsets)
    data, tiles = multiply_quantized(a, b, bias, how, groups)
    if layout == "tcgen05":
        return [data, tiles]
    columns = b.shape[-1] // (2 if how.swiglu else 1)
    shape = a.shape[0], columns // get_format(how.format).block_size
    if offsets is None:
        scale, ends = get_layout("tcgen05").unswizzle(tiles, shape, tiles.dtype), None
    else:
        ends = inside(offsets, shape[0])  # as the kernel takes them
        scale = Grouped(get_layout("tcgen05")).unswizzle(tiles, shape, tiles.dtype, ends)
    return [data, swizzle_scale(scale, -1, get_layout(layout), ends)]
