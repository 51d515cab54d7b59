"""RMSNorm and quantization of its rows from one read, of torch's tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...dtypes import from_torch
from ...formats import Format, get_format
from ..common.gpu import Gpu, Unsupported
from ..common.runtime import FLOATS, Described, describe, gpu_of
from ..common.template import template
from .config import Request
from .norm_config import choose_norm, most_columns
from .outputs import Output, choose_output
from .plan import as_matrix, unsupported

__all__ = ["rmsnorm", "unsupported_rmsnorm"]


@dataclass(frozen=True, slots=True)
class _Plan:
    """``view`` has shape and strides of ``x`` as a matrix, where it is none."""

    run: Callable[..., Any]
    view: tuple[tuple[int, int], tuple[int, int]] | None
    output: Output
    rstd: Tensor


def rmsnorm(
    x: Tensor,
    weight: Tensor,
    request: Request,
    *,
    eps: float,
    global_scale: Tensor | None = None,
    gpu: Gpu | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Data and scales, along rows, of the RMSNorm of ``x`` (..., K), and rstd (...,) in fp32.

    Byte for byte ``reference.quantize`` of ``reference.rmsnorm``, its scales put into the layout of
    ``request``, whose only axis is -1.
    ``weight`` (K,) may have another dtype than ``x``. One-byte scales are returned as uint8.
    ``gpu``: to choose the kernel for where ``x`` is on a CPU, for the emulator.

    Raises Unsupported, a ValueError, where ``unsupported_rmsnorm`` gives a reason; ValueError for a
    ``weight`` that does not fit ``x``, and for a missing ``global_scale``.
    """
    gpu, format = gpu or gpu_of(x.device), request.fmt
    reason = unsupported_rmsnorm(x, format, request.layouts[0], gpu)
    if reason:
        raise Unsupported(reason)
    if format.has_global_scale and global_scale is None:
        raise ValueError(f"global_scale: {format.name} needs one")
    k = x.shape[-1]
    if weight.shape != (k,) or weight.dtype not in FLOATS or not weight.is_contiguous():
        raise ValueError(
            f"weight: got {tuple(weight.shape)} {weight.dtype} with stride {weight.stride()}; "
            f"allowed: ({k},), contiguous, of {', '.join(map(str, FLOATS))}"
        )
    if weight.device != x.device:
        raise ValueError(f"weight: is on {weight.device}; move it to {x.device}, where x is")
    assert gpu is not None  # else it is not supported
    plan = _plan(describe(x), describe(weight), x.device, gpu, request)
    data, scale = torch.empty_like(plan.output.data), torch.empty_like(plan.output.scale)
    rstd = torch.empty_like(plan.rstd)
    matrix = x if plan.view is None else x.as_strided(*plan.view)
    plan.run(matrix, weight, data, scale, rstd, eps, global_scale)
    return (*plan.output.shaped(data, scale), rstd if x.ndim == 2 else rstd.view(x.shape[:-1]))


def unsupported_rmsnorm(x: Tensor, format: Format, layout: str, gpu: Gpu | None = None) -> str:
    """Why the kernel cannot normalize and quantize ``x`` so; empty where it can."""
    reason = unsupported(x, Request(format.name, layouts=(layout,)), gpu)
    return reason or _unsupported(x.shape, x.dtype, format.name)


@lru_cache(maxsize=4096)
def _unsupported(shape: torch.Size, dtype: torch.dtype, format: str) -> str:
    fmt = get_format(format)
    if 0 in shape:
        return f"x has shape {tuple(shape)}: nothing to normalize"
    if fmt.block[0] > 1:
        return f"format {format}: the kernel has no blocks of several rows"
    most = most_columns(from_torch(dtype), fmt)
    if shape[-1] > most:
        return f"x has {shape[-1]} columns: shared memory holds rows of at most {most} of {dtype}"
    return ""


@lru_cache(maxsize=4096)
def _plan(
    x: Described, weight: Described, device: torch.device, gpu: Gpu, request: Request
) -> _Plan:
    assert request.axes == (-1,)
    shape, stride, dtype, address = x
    found = as_matrix(shape, stride)
    assert found is not None  # else it is not supported
    rows, columns, apart = found
    source = address, apart * dtype.itemsize
    given = weight[3], from_torch(weight[2])
    config = choose_norm((rows, columns), source, from_torch(dtype), given, request, gpu)
    same = len(shape) == 2 and stride == (apart, 1)
    return _Plan(
        run=gpu.load(config),
        view=None if same else ((rows, columns), (apart, 1)),
        output=choose_output(shape, request.fmt, -1, request.layouts[0], device, None),
        rstd=template((rows,), torch.float32, device),
    )
