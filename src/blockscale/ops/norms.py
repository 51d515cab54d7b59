"""The ops of RMSNorm and LayerNorm: with a quantizer behind, alone, and their backward.

What is ``centered`` is LayerNorm. An op returns a list: what is asked for, then the mean of each
row if it is centered, its rstd, and last the global scale where it found one itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..formats import get_format
from ..kernels.common.gpu import Unsupported
from ..kernels.common.runtime import gpu_of
from ..kernels.quantizers import calls as quantizers
from ..layouts import get_layout, swizzle_scale
from . import fakes
from .backends import fall_back
from .fused import asked_forms, fake_scalar, quantize_values
from .operation import operation
from .quantize import written_layouts

__all__ = ["norm", "norm_backward", "norm_quantize"]


def _fake_statistics(x: Tensor, centered: bool) -> list[Tensor]:
    return [x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(1 + centered)]


def _fake_norm(x: Tensor, centered: bool) -> list[Tensor]:
    return [x.new_empty(x.shape), *_fake_statistics(x, centered)]


@operation(_fake_norm)
def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool
) -> list[Tensor]:
    """``reference.rmsnorm`` or ``reference.layernorm`` of ``x`` (..., K)."""
    if gpu_of(x.device) is not None:
        fall_back("norm", x, "auto", "there are kernels with a quantizer behind alone")
    return _norm(x, weight, bias, eps, centered)


def _norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool
) -> list[Tensor]:
    if centered:
        return list(reference.layernorm(x, weight, bias, eps))
    return list(reference.rmsnorm(x, weight, eps))


def _fake_backward(
    x: Tensor, weight: Tensor, mean: Tensor | None, bias_dtype: torch.dtype | None
) -> list[Tensor]:
    found = [x.new_empty(x.shape), weight.new_empty(weight.shape)]
    return (
        found if bias_dtype is None else [*found, weight.new_empty(weight.shape, dtype=bias_dtype)]
    )


@operation(_fake_backward)
def norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    bias_dtype: torch.dtype | None,
) -> list[Tensor]:
    """Gradients of ``x``, of ``weight`` and of a bias of ``bias_dtype``, if there is one, from that
    of ``norm``, which has the ``mean`` if it is centered."""
    if mean is None:
        return list(reference.rmsnorm_backward(grad, x, weight, rstd))
    *found, of_bias = reference.layernorm_backward(grad, x, weight, mean, rstd)
    return found if bias_dtype is None else [*found, of_bias.to(bias_dtype)]


def _fake_norm_quantize(
    x: Tensor,
    centered: bool,
    format: str,
    rows: bool,
    columns: bool,
    row_layout: str,
    column_layout: str,
    global_scale: Tensor | None,
    k_major: bool,
) -> list[Tensor]:
    fmt = get_format(format)
    results: list[Tensor] = []
    for axis, layout in zip(*asked_forms(rows, columns, row_layout, column_layout), strict=True):
        results += fakes.empty(x, fmt, axis, layout, None, k_major)
    return [*results, *_fake_statistics(x, centered), *fake_scalar(x, fmt, global_scale)]


@operation(_fake_norm_quantize)
def norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    format: str,
    rows: bool,
    columns: bool,
    scale_rounding: str,
    nonfinite: str,
    row_layout: str,
    column_layout: str,
    global_scale: Tensor | None = None,
    backend: str = "auto",
    k_major: bool = False,
) -> list[Tensor]:
    """``norm`` of ``x``, quantized along ``rows`` (axis -1), ``columns`` (axis -2) or both.

    On a GPU rows of RMSNorm come from one read. Others have their statistics found by a first one.
    """
    axes, layouts = asked_forms(rows, columns, row_layout, column_layout)
    asked = quantizers.Request(format, axes, layouts, scale_rounding, nonfinite, k_major=k_major)
    if gpu_of(x.device) is not None and backend != "reference":
        known = global_scale is not None or not asked.fmt.has_global_scale
        try:
            if known and axes == (-1,) and not centered:  # from one read
                return _rmsnorm_by_kernel(x, weight, eps, asked, global_scale)
            return _by_statistics((x, weight, bias), eps, centered, asked, global_scale)
        except Unsupported as why:
            fall_back(
                "layernorm_quantize" if centered else "rmsnorm_quantize", x, backend, str(why)
            )
    values, *statistics = _norm(x, weight, bias, eps, centered)
    count = 2 * len(axes)
    results = quantize_values(values, asked, global_scale, None, backend)
    return [*results[:count], *statistics, *results[count:]]


def _rmsnorm_by_kernel(
    x: Tensor,
    weight: Tensor,
    eps: float,
    asked: quantizers.Request,
    global_scale: Tensor | None,
) -> list[Tensor]:
    """What the kernel of rows makes of ``x``; Unsupported where there is none."""
    layouts, given = asked.layouts, asked._replace(layouts=_written(asked))
    data, scale, rstd = quantizers.rmsnorm(x, weight, given, eps=eps, global_scale=global_scale)
    if given.layouts != layouts:
        scale = swizzle_scale(scale, -1, get_layout(layouts[0]), None)
    return [data, scale, rstd]


def _by_statistics(
    inputs: tuple[Tensor, Tensor, Tensor | None],
    eps: float,
    centered: bool,
    asked: quantizers.Request,
    global_scale: Tensor | None,
) -> list[Tensor]:
    """What the quantizer makes with a norm in front, after a kernel has found the statistics of
    rows; Unsupported where there are no such. ``inputs``: x, weight and bias."""
    x, layouts = inputs[0], asked.layouts
    given = asked._replace(layouts=_written(asked))
    made = quantizers.row_statistics(*inputs, given, eps=eps, centered=centered)
    by: Any = {"others": (made.vector,)}
    found = []
    if asked.fmt.has_global_scale and global_scale is None:
        global_scale = quantizers.global_scale(x, asked.fmt, producer=made.producer, **by)
        found = [global_scale]
    given = given._replace(producer=made.producer)
    results: list[Tensor] = []
    pairs = quantizers.quantize(x, given, global_scale=global_scale, **by)
    for (data, scale), axis, layout in zip(pairs, asked.axes, layouts, strict=True):
        if given.layouts != layouts:
            scale = swizzle_scale(scale, axis, get_layout(layout), None)
        results += data, scale
    # results of an op must not share memory: the vector is rstd's
    mean = [] if made.mean is None else [made.mean.clone()]
    return [*results, *mean, made.rstd, *found]


def _written(asked: quantizers.Request) -> tuple[str, ...]:
    """The layouts that kernels write, which may be others."""
    return written_layouts(asked.fmt, asked.layouts)
