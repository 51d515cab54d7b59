"""The ops ``swiglu_quantize`` and ``rmsnorm_quantize``: a producer and the quantizer behind it.

On a GPU one kernel reads what the producer needs and writes what the quantizer gives. Elsewhere,
and where there is no such kernel, the reference makes the values and ``quantize`` takes them.

An op returns a list: data and scales for each axis, what else it promises, and last the global
scale where it found one itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..formats import Format, get_format
from ..kernels.common.runtime import gpu_of
from ..kernels.quantizers import calls as quantizers
from ..layouts import get_layout, swizzle_scale
from . import fakes
from .backends import fall_back
from .operation import operation
from .quantize import global_scale, quantize, quantize_both, written_layouts

__all__ = ["fake_scalar", "quantize_values", "rmsnorm_quantize", "swiglu_quantize"]

_UNKNOWN_SCALE = (
    "global_scale: found from the normalized values, which the kernel does not keep; pass one"
)


# --- SwiGLU ---------------------------------------------------------------------------------------


def _fake_swiglu(
    x: Tensor,
    grad: Tensor | None,
    format: str,
    rows: bool,
    columns: bool,
    row_layout: str,
    column_layout: str,
    global_scale: Tensor | None,
    offsets: Tensor | None,
    k_major: bool,
) -> list[Tensor]:
    fmt = get_format(format)
    values = x if grad is not None else x[..., : x.shape[-1] // 2]
    results: list[Tensor] = []
    for axis, layout in zip(*_asked(rows, columns, row_layout, column_layout), strict=True):
        results += fakes.empty(values, fmt, axis, layout, offsets, k_major)
    return results + fake_scalar(x, fmt, global_scale)


@operation(_fake_swiglu)
def swiglu_quantize(
    x: Tensor,
    grad: Tensor | None,
    format: str,
    rows: bool,
    columns: bool,
    scale_rounding: str,
    nonfinite: str,
    row_layout: str,
    column_layout: str,
    global_scale: Tensor | None = None,
    offsets: Tensor | None = None,
    backend: str = "auto",
    k_major: bool = False,
) -> list[Tensor]:
    """``reference.swiglu`` of ``x``, with ``grad`` ``reference.swiglu_backward``, quantized along
    ``rows`` (axis -1), ``columns`` (axis -2) or both, from one read.
    """
    fmt = get_format(format)
    axes, layouts = _asked(rows, columns, row_layout, column_layout)
    more = scale_rounding, nonfinite, global_scale, offsets
    if gpu_of(x.device) is not None and backend != "reference":
        try:
            return _swiglu_by_kernel(x, grad, fmt, axes, layouts, *more, k_major)
        except quantizers.Unsupported as why:
            producer = "swiglu" if grad is None else "swiglu_backward"
            fall_back(f"{producer}_quantize", x, backend, str(why))
    values = reference.swiglu(x) if grad is None else reference.swiglu_backward(grad, x)
    return quantize_values(values, format, axes, layouts, *more, backend, k_major)


def _swiglu_by_kernel(
    x: Tensor,
    grad: Tensor | None,
    fmt: Format,
    axes: tuple[int, ...],
    layouts: tuple[str, ...],
    scale_rounding: str,
    nonfinite: str,
    global_scale: Tensor | None,
    offsets: Tensor | None,
    k_major: bool,
) -> list[Tensor]:
    """What the kernel makes of ``x``; Unsupported where there is none."""
    producer, others = ("swiglu", ()) if grad is None else ("swiglu_backward", (grad,))
    written = written_layouts(fmt, layouts)
    found = []
    if fmt.has_global_scale and global_scale is None:
        global_scale = quantizers.global_scale(x, fmt, producer=producer, others=others)
        found = [global_scale]
    pairs = quantizers.quantize(
        x,
        fmt,
        axes=axes,
        layouts=written,
        scale_rounding=scale_rounding,
        nonfinite=nonfinite,
        global_scale=global_scale,
        offsets=offsets,
        producer=producer,
        others=others,
        k_major=k_major,
    )
    results: list[Tensor] = []
    for (data, scale), axis, layout in zip(pairs, axes, layouts, strict=True):
        if written is not layouts:
            scale = swizzle_scale(scale, axis, get_layout(layout), None)
        results += data, scale
    return results + found


def _asked(
    rows: bool, columns: bool, row_layout: str, column_layout: str
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The axes that are asked for, and the layout of each."""
    return (-1,) * rows + (-2,) * columns, (row_layout,) * rows + (column_layout,) * columns


# --- RMSNorm --------------------------------------------------------------------------------------


def _fake_rmsnorm(x: Tensor, format: str, layout: str, global_scale: Tensor | None) -> list[Tensor]:
    fmt = get_format(format)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return [*fakes.empty(x, fmt, -1, layout, None), rstd, *fake_scalar(x, fmt, global_scale)]


@operation(_fake_rmsnorm)
def rmsnorm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    format: str,
    scale_rounding: str,
    nonfinite: str,
    layout: str,
    global_scale: Tensor | None = None,
    backend: str = "auto",
) -> list[Tensor]:
    """``reference.rmsnorm`` of ``x``, quantized along rows, and its rstd."""
    fmt = get_format(format)
    more = scale_rounding, nonfinite, global_scale
    if gpu_of(x.device) is not None and backend != "reference":
        try:
            return _rmsnorm_by_kernel(x, weight, eps, fmt, layout, *more)
        except quantizers.Unsupported as why:
            fall_back("rmsnorm_quantize", x, backend, str(why))
    values, rstd = reference.rmsnorm(x, weight, eps)
    data, scale, *found = quantize_values(values, format, (-1,), (layout,), *more, None, backend)
    return [data, scale, rstd, *found]


def _rmsnorm_by_kernel(
    x: Tensor,
    weight: Tensor,
    eps: float,
    fmt: Format,
    layout: str,
    scale_rounding: str,
    nonfinite: str,
    global_scale: Tensor | None,
) -> list[Tensor]:
    """What the kernel makes of ``x``; Unsupported where there is none."""
    if fmt.has_global_scale and global_scale is None:
        raise quantizers.Unsupported(_UNKNOWN_SCALE)
    (written,) = written_layouts(fmt, (layout,))
    data, scale, rstd = quantizers.rmsnorm(
        x,
        weight,
        fmt,
        eps=eps,
        layout=written,
        scale_rounding=scale_rounding,
        nonfinite=nonfinite,
        global_scale=global_scale,
    )
    if written != layout:
        scale = swizzle_scale(scale, -1, get_layout(layout), None)
    return [data, scale, rstd]


# --- what both need -------------------------------------------------------------------------------


def quantize_values(
    values: Tensor,
    format: str,
    axes: tuple[int, ...],
    layouts: tuple[str, ...],
    scale_rounding: str,
    nonfinite: str,
    scalar: Tensor | None,
    offsets: Tensor | None,
    backend: str,
    k_major: bool = False,
) -> list[Tensor]:
    """``values`` quantized along ``axes``, and their global scale where none was given."""
    found = []
    if get_format(format).has_global_scale and scalar is None:
        scalar = global_scale(values, format, backend)
        found = [scalar]
    further = scalar, offsets, None, backend, k_major
    pair: tuple[Tensor, ...]
    if len(axes) == 2:
        pair = quantize_both(
            values, format, scale_rounding, nonfinite, layouts[0], layouts[1], *further
        )
    else:
        pair = quantize(values, format, axes[0], scale_rounding, nonfinite, layouts[0], *further)
    return [*pair, *found]


def fake_scalar(x: Tensor, fmt: Format, global_scale: Tensor | None) -> list[Tensor]:
    if not fmt.has_global_scale or global_scale is not None:
        return []
    return [fakes.global_scale(x)]
