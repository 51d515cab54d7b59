"""``gemm_quantize``: a product whose result the next product reads."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .checks import check_flag
from .formats import Format, get_format
from .gemm import side
from .gemm_checks import check_product
from .layouts import Layout
from .quantize_checks import Arguments, check_call, resolve_global_scale
from .tensor import ScaledTensor

__all__ = ["gemm_quantize"]


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
    if 0 in shape:
        raise ValueError(
            f"a, b: got {tuple(a.shape)} @ {tuple(b.shape)}; there is nothing to quantize, leave "
            "empty tensors out"
        )
    asked = Arguments((-1,), name, scale_rounding, (layout,), nonfinite, backend=backend)
    call = check_call(shape, torch.float32, asked)
    scalar = None
    if global_scale is not None:
        scalar = resolve_global_scale(global_scale, a, call.format, backend)
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
