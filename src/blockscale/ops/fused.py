"""The ops of SwiGLU: with a quantizer behind, alone, and its backward.

On a GPU one kernel reads what the producer needs and writes what the quantizer gives. Elsewhere,
and where there is no such kernel, a compiled loop (SwiGLU on a CPU) or the reference makes the
values, and ``quantize`` takes them.

An op returns a list: data and scales for each axis, what else it promises, and last the global
scale where it found one itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..formats import Format, get_format
from ..kernels.common.gpu import Unsupported
from ..kernels.common.runtime import gpu_of
from ..kernels.cpu import calls as cpu
from ..kernels.experts import calls as experts
from ..kernels.quantizers import calls as quantizers
from ..kernels.quantizers.config import DOT
from ..layouts import get_layout, swizzle_scale
from . import fakes
from .backends import fall_back, no_cpu_kernels, on_cpu
from .operation import operation
from .quantize import global_scale, quantize, quantize_both, written_layouts

__all__ = [
    "added_up",
    "asked_forms",
    "fake_scalar",
    "partial_sums",
    "quantize_values",
    "swiglu",
    "swiglu_backward",
    "swiglu_quantize",
]


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
    weights: Tensor | None,
) -> list[Tensor]:
    fmt = get_format(format)
    values = x if grad is not None else x[..., : x.shape[-1] // 2]
    results: list[Tensor] = []
    for axis, layout in zip(*asked_forms(rows, columns, row_layout, column_layout), strict=True):
        results += fakes.empty(values, fmt, axis, layout, offsets, k_major)
    if weights is not None and grad is not None:
        results.append(torch.empty_like(weights))
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
    weights: Tensor | None = None,
) -> list[Tensor]:
    """``reference.swiglu`` of ``x``, with ``grad`` ``reference.swiglu_backward``, quantized along
    ``rows`` (axis -1), ``columns`` (axis -2) or both, from one read. With fp32 ``weights`` of rows
    ``reference.weighted_swiglu`` and its backward, which has the gradient of weights after these.
    """
    axes, layouts = asked_forms(rows, columns, row_layout, column_layout)
    producer, grouped = "swiglu" if grad is None else "swiglu_backward", offsets is not None
    producer = producer if weights is None else f"weighted_{producer}"
    asked = quantizers.Request(
        format, axes, layouts, scale_rounding, nonfinite, producer, grouped, k_major
    )
    if gpu_of(x.device) is not None and backend != "reference":
        try:
            return _swiglu_by_kernel(x, grad, asked, global_scale, offsets, weights)
        except Unsupported as why:
            name = producer.removeprefix("weighted_")
            fall_back(f"{name}_quantize", x, backend, str(why))
    values, *sums = _swiglu_values(x, grad, weights, backend)
    count = 2 * len(axes)
    results = quantize_values(values, asked, global_scale, offsets, backend)
    return [*results[:count], *sums, *results[count:]]


def _swiglu_values(
    x: Tensor, grad: Tensor | None, weights: Tensor | None, backend: str
) -> tuple[Tensor, ...]:
    """What is to be quantized, and, after it, the gradient of weights."""
    compiled = backend != "reference" and on_cpu(x) and not no_cpu_kernels()
    made: Any = cpu if compiled else reference
    if grad is None:
        values = made.swiglu(x)
        return (values if weights is None else reference.weighted(values, weights),)
    if weights is None:
        return (made.swiglu_backward(grad, x),)
    of_x = made.swiglu_backward(reference.weighted(grad, weights), x)
    return of_x, reference.weight_gradient(grad, made.swiglu(x))


def _swiglu_by_kernel(
    x: Tensor,
    grad: Tensor | None,
    asked: quantizers.Request,
    global_scale: Tensor | None,
    offsets: Tensor | None,
    weights: Tensor | None,
) -> list[Tensor]:
    """What the kernel makes of ``x``; Unsupported where there is none."""
    fmt, axes, layouts, producer = asked.fmt, asked.axes, asked.layouts, asked.producer
    sums = None if weights is None or grad is None else partial_sums(grad)
    others = tuple(each for each in (grad, weights, sums) if each is not None)
    written = written_layouts(fmt, layouts)
    found = []
    if fmt.has_global_scale and global_scale is None:
        global_scale = quantizers.global_scale(x, fmt, producer=producer, others=others)
        found = [global_scale]
    pairs = quantizers.quantize(
        x,
        asked if written is layouts else asked._replace(layouts=written),
        global_scale=global_scale,
        offsets=offsets,
        others=others,
    )
    results: list[Tensor] = []
    for (data, scale), axis, layout in zip(pairs, axes, layouts, strict=True):
        if written is not layouts:
            scale = swizzle_scale(scale, axis, get_layout(layout), None)
        results += data, scale
    if sums is not None:
        results.append(added_up(sums, len(x)))
    return results + found


def partial_sums(grad: Tensor) -> Tensor:
    """Room for sums of ``DOT`` columns each: rows of multiples of 16 bytes."""
    rows = -(-len(grad) // 4) * 4
    return grad.new_empty(-(-grad.shape[1] // DOT), rows, dtype=torch.float32)


def added_up(sums: Tensor, rows: int) -> Tensor:
    """Those of the first ``rows``, one after the other, as the reference does and ``combine`` with
    rows of a token."""
    in_order = torch.arange(len(sums), device=sums.device).view(1, -1)
    return experts.combine(sums, in_order, None, torch.float32).view(-1)[:rows]


# --- SwiGLU alone ---------------------------------------------------------------------------------


def _fake_swiglu_alone(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@operation(_fake_swiglu_alone)
def swiglu(x: Tensor) -> Tensor:
    """``reference.swiglu`` of ``x`` (..., 2H)."""
    _tell_of_no_kernel("swiglu", x)
    return _swiglu_values(x, None, None, "auto")[0]


def _fake_swiglu_backward(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@operation(_fake_swiglu_backward)
def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """``reference.swiglu_backward`` of ``grad`` (..., H) and ``x``."""
    _tell_of_no_kernel("swiglu_backward", x)
    return _swiglu_values(x, grad, None, "auto")[0]


def _tell_of_no_kernel(operation: str, x: Tensor) -> None:
    if gpu_of(x.device) is not None:
        fall_back(operation, x, "auto", "there are kernels with a quantizer behind alone")


# --- what norms need, too -------------------------------------------------------------------------


def asked_forms(
    rows: bool, columns: bool, row_layout: str, column_layout: str
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The axes that are asked for, and the layout of each."""
    return (-1,) * rows + (-2,) * columns, (row_layout,) * rows + (column_layout,) * columns


def quantize_values(
    values: Tensor,
    asked: quantizers.Request,
    scalar: Tensor | None,
    offsets: Tensor | None,
    backend: str,
) -> list[Tensor]:
    """``values`` quantized as is asked for, whatever made them, and their global scale where none
    was given."""
    format, axes, layouts = asked.format, asked.axes, asked.layouts
    found = []
    if asked.fmt.has_global_scale and scalar is None:
        scalar = global_scale(values, format, backend)
        found = [scalar]
    assert asked.scale_rounding is not None  # ops are given its name
    rounding, further = (asked.scale_rounding, asked.nonfinite), (backend, asked.k_major)
    pair: tuple[Tensor, ...]
    if len(axes) == 2:
        both = layouts[0], layouts[1]
        pair = quantize_both(values, format, *rounding, *both, scalar, offsets, None, *further)
    else:
        one = layouts[0]
        pair = quantize(values, format, axes[0], *rounding, one, scalar, offsets, None, *further)
    return [*pair, *found]


def fake_scalar(x: Tensor, fmt: Format, global_scale: Tensor | None) -> list[Tensor]:
    if not fmt.has_global_scale or global_scale is not None:
        return []
    return [fakes.global_scale(x)]
