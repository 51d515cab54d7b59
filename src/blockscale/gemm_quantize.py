"""``gemm_quantize`` and ``grouped_gemm_quantize``: products whose result the next product reads."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .checks import check_flag
from .formats import Format, get_format
from .gemm import side, sides_of_groups
from .gemm_checks import check_grouped, check_groups_given, check_product
from .layouts import Layout
from .quantize_checks import Arguments, Call, check_call, given_global_scale
from .tensor import ScaledTensor

__all__ = ["gemm_quantize", "grouped_gemm_quantize"]


def gemm_quantize(
    a: ScaledTensor | Tensor,
    b: ScaledTensor,
    format: str | Format = "mxfp8",
    *,
    swiglu: bool = False,
    bias: Tensor | None = None,
    scale_rounding: str | None = None,
    layout: str | Layout = "compact",
    nonfinite: str = "propagate",
    global_scale: Tensor | float | None = None,
    backend: str = "auto",
) -> ScaledTensor:
    """Quantize ``a @ b + bias``, or SwiGLU of it, along rows, as the next product wants its ``a``.

    The product is added up in fp32, and nothing is rounded before it is quantized: the bytes are
    those of :func:`blockscale.quantize` of ``gemm(a, b, torch.float32, bias=bias)``, or of
    :func:`blockscale.swiglu_quantize` of it.

    >>> x, w = torch.randn(64, 512), torch.randn(256, 512)  # w: 128 rows of the gate, 128 of up
    >>> q = bs.gemm_quantize(bs.quantize(x, "mxfp8"), bs.quantize(w, "mxfp8").mT, swiglu=True)
    >>> q.shape
    torch.Size([64, 128])

    On Blackwell one kernel does all of it to mxfp8, mxfp8_e5m2, mxfp4 and nvfp4, where it can
    multiply ``a`` and ``b``, the result's columns are a multiple of 32, and nvfp4 is given its
    ``global_scale``. It writes scales in layout "tcgen05"; others are rewritten. With ``swiglu`` it
    reads those of ``b`` as they are if N / 2 is a multiple of 128. It has run in the emulator only.
    Otherwise, and on Hopper, two kernels write and read the product in fp32; nvfp4 without its
    ``global_scale`` takes three.

    Args:
        a, b, bias: as in :func:`blockscale.gemm`.
        format: of the result, any of :data:`blockscale.formats`.
        swiglu: quantize ``silu(gate) * up`` (M, N / 2), the gate in the first N / 2 columns of the
            product, which are those of ``b`` (K, N).
        scale_rounding, layout, nonfinite: of the result, as in :func:`blockscale.quantize`.
        global_scale: of the result, as in :func:`blockscale.quantize`; its default depends on all
            of the product.
        backend: as in :func:`blockscale.gemm`.

    Returns:
        A :class:`ScaledTensor` (M, N), or (M, N / 2) with ``swiglu``, of the dtype of ``a``,
        blocked along -1. It has no gradient.

    Raises TypeError or ValueError as :func:`blockscale.gemm` and :func:`blockscale.quantize`, with
    the remedy.
    """
    check_flag("swiglu", swiglu)
    check_product(a, b, torch.float32, None, False, bias, backend)
    name = format.name if isinstance(format, Format) else format
    shape = a.shape[0], _columns(b.shape[1], get_format(name), swiglu)
    asked = Arguments((-1,), name, scale_rounding, (layout,), nonfinite, backend=backend)
    call = _checked(a, b, shape, asked)
    scalar = given_global_scale(global_scale, a, call, backend)
    data, scale, *found = ops.gemm_quantize(
        *side(a.detach() if a.requires_grad else a),
        *side(b),
        bias.detach() if bias is not None and bias.requires_grad else bias,
        name,
        swiglu,
        call.scale_rounding,
        nonfinite,
        call.layouts[0].name,
        scalar,
        backend,
    )
    return ScaledTensor(
        data,
        scale,
        format=call.format,
        shape=shape,
        dtype=a.dtype,
        layout=call.layouts[0],
        global_scale=found[0] if found else scalar,
    )


def grouped_gemm_quantize(
    a: ScaledTensor | Tensor,
    b: ScaledTensor,
    offsets: Tensor,
    format: str | Format = "mxfp8",
    *,
    swiglu: bool = False,
    out_dtype: torch.dtype = torch.float32,
    scale_rounding: str | None = None,
    layout: str | Layout = "compact",
    nonfinite: str = "propagate",
    global_scale: Tensor | float | None = None,
    backend: str = "auto",
) -> ScaledTensor:
    """Quantize the product of each group of rows, or SwiGLU of it, as the next grouped product
    wants its ``a``: what experts do between their two.

    The bytes are those of :func:`blockscale.quantize` of ``grouped_gemm(a, b, offsets,
    out_dtype)``, or of :func:`blockscale.swiglu_quantize` of it, with these ``offsets``.

    >>> ends = torch.tensor([24, 64], dtype=torch.int32)  # rows of two experts
    >>> x, w = torch.randn(64, 512), torch.randn(2, 256, 512)  # 128 rows of gate, 128 of up
    >>> a, b = bs.quantize(x, "mxfp8"), bs.quantize(w, "mxfp8").mT
    >>> q = bs.grouped_gemm_quantize(a, b, ends, swiglu=True, out_dtype=torch.bfloat16)
    >>> q.shape
    torch.Size([64, 128])

    On Blackwell one kernel does all of it, where :func:`gemm_quantize` has one; with layout
    "tcgen05" it writes scales where the next product reads them. It has run in the emulator only.
    Otherwise, and on Hopper, the product is written and read.

    Args:
        a, b, offsets: as in :func:`blockscale.grouped_gemm`, of groups of rows.
        out_dtype: of the product: torch.float32, which is not rounded before it is quantized, or
            torch.bfloat16: as if it, and SwiGLU of it, had been stored.

    The other arguments are those of :func:`gemm_quantize`.

    Returns:
        A :class:`ScaledTensor` (M, N), or (M, N / 2) with ``swiglu``, of the dtype of ``a``,
        blocked along -1, with these ``offsets``. It has no gradient.

    Raises TypeError or ValueError as :func:`blockscale.grouped_gemm` and :func:`gemm_quantize`.
    """
    check_flag("swiglu", swiglu)
    if out_dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"out_dtype: got {out_dtype}; choose torch.float32 or torch.bfloat16")
    groups = check_groups_given(b, offsets, None)
    if groups.grouping != "m":
        raise ValueError(f"b: got {tuple(b.shape)}; expected (groups, K, N), rows are grouped")
    check_grouped(a, b, groups, torch.float32, None, False, backend)
    name = format.name if isinstance(format, Format) else format
    shape = a.shape[0], _columns(b.shape[-1], get_format(name), swiglu)
    asked = Arguments((-1,), name, scale_rounding, (layout,), nonfinite, backend=backend)
    call = _checked(a, b, shape, asked, grouped=True)
    scalar = given_global_scale(global_scale, a, call, backend)
    left, right = sides_of_groups(a.detach() if a.requires_grad else a, b, groups)
    data, scale, *found = ops.grouped_gemm_quantize(
        *left,
        *right,
        groups.offsets,
        name,
        swiglu,
        out_dtype == torch.bfloat16,
        call.scale_rounding,
        nonfinite,
        call.layouts[0].name,
        scalar,
        backend,
    )
    return ScaledTensor(
        data,
        scale,
        format=call.format,
        shape=shape,
        dtype=a.dtype,
        layout=call.layouts[0],
        global_scale=found[0] if found else scalar,
        offsets=groups.offsets,
    )


def _checked(
    a: Tensor, b: Tensor, shape: tuple[int, int], asked: Arguments, grouped: bool = False
) -> Call:
    """How a product of ``shape`` is quantized; ValueError where there is none."""
    if 0 in shape:
        raise ValueError(
            f"a, b: got {tuple(a.shape)} @ {tuple(b.shape)}; there is nothing to quantize, leave "
            "empty tensors out"
        )
    return check_call(shape, torch.float32, asked, grouped)


def _columns(n: int, format: Format, swiglu: bool) -> int:
    """Of the result, from ``n`` of ``b``."""
    if swiglu and n % 2:
        raise ValueError(
            f"b: has {n} columns; with swiglu=True they are gate and up side by side, as many of "
            "each: expected an even number"
        )
    columns = n // 2 if swiglu else n
    if columns % format.block_size:
        raise ValueError(
            f"b: has {n} columns, so that {columns} are quantized: not a multiple of "
            f"{format.name}'s block of {format.block_size}; multiply by gemm to float32 and pass "
            f"pad=True to {'swiglu_quantize' if swiglu else 'quantize'}, or pad b with columns of "
            f"zeros{', each half' * swiglu}"
        )
    return columns
