"""Quantization on a GPU, by kernels written in CuTe DSL: the reference's bytes at memory speed.

CuTe DSL is imported by the first call. See ``kernel`` for the kernel, ``config`` for how it is
chosen, ``compiled`` for how it is compiled and kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...formats import Format, get_format
from ...layouts import get_layout
from .config import choose_config, why_not

__all__ = ["architecture", "quantize", "unsupported"]


@dataclass(frozen=True, slots=True)
class _Output:
    """What a call allocates for one axis."""

    data: tuple[int, int]  # bytes
    data_shape: tuple[int, ...]
    element: torch.dtype
    scale: tuple[int, ...]
    scale_dtype: torch.dtype


@lru_cache
def architecture(index: int) -> str:
    """Target of a CUDA device: "sm_90a", "sm_100a", or another one's without a kernel."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}" + "a" * (major in (9, 10))


def unsupported(
    x: Tensor, format: Format, axes: Sequence[int], layout: str, arch: str | None = None
) -> str:
    """Why the kernels cannot quantize ``x`` so; empty where they can."""
    if find_spec("cutlass") is None or find_spec("tvm_ffi") is None:
        return "CuTe DSL is not installed: pip install 'blockscale[cuda]'"
    if arch is None:
        if x.device.type != "cuda":
            return f"x is on {x.device}: the kernels run on CUDA devices"
        arch = architecture(x.device.index)
    if x.dim() > 2 and (layout != "compact" or not x.is_contiguous() or -2 in axes):
        return f"x has shape {tuple(x.shape)}: the kernels take matrices, or contiguous rows"
    if x.dim() < 2 and -2 in axes:
        return f"x has shape {tuple(x.shape)}: blocks along columns need a matrix"
    return why_not(format, axes, layout, arch, x.dtype)


def quantize(
    x: Tensor,
    format: Format,
    *,
    axes: tuple[int, ...] = (-1,),
    scale_rounding: str | None = None,
    nonfinite: str = "propagate",
    layout: str = "compact",
    global_scale: Tensor | None = None,
    arch: str | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Data and scales of ``x`` (..., M, K) for each of ``axes``, (-1,), (-2,) or (-1, -2), from one
    read of ``x``; byte for byte ``reference.quantize`` with its scales put into ``layout``.

    One-byte scales are returned as uint8. ``x`` is contiguous in its last dimension, its rows may
    lie apart. ``arch``: of the kernel where ``x`` is on a CPU, for the emulator.

    Raises ValueError where ``unsupported`` gives a reason, and for a missing ``global_scale``.
    """
    reason = unsupported(x, format, axes, layout, arch)
    if reason:
        raise ValueError(f"quantize: {reason}")
    if format.has_global_scale and global_scale is None:
        raise ValueError(f"global_scale: {format.name} needs one")
    matrix = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if matrix.stride(1) != 1 and matrix.shape[1] > 1:
        raise ValueError(f"x: strides {x.stride()} are not contiguous in the last dimension")
    run, outputs = _plan(
        tuple(x.shape),
        tuple(matrix.shape),
        matrix.stride(0) if matrix.shape[0] > 1 else -(-matrix.shape[1] // 8) * 8,
        matrix.data_ptr() % 16,
        x.dtype,
        format.name,
        axes,
        scale_rounding,
        nonfinite,
        layout,
        arch or architecture(x.device.index),
        x.device.type == "cuda",
    )
    results: list[tuple[Tensor, Tensor]] = []
    arguments: list[Tensor | None] = [None] * 4
    for axis, output in zip(axes, outputs, strict=True):
        data = torch.empty(output.data, dtype=torch.uint8, device=x.device)
        scale = torch.empty(output.scale, dtype=output.scale_dtype, device=x.device)
        arguments[2 * (axis == -2) : 2 * (axis == -2) + 2] = data, scale
        results.append((data.view(output.data_shape).view(output.element), scale))
    run(matrix, *arguments, global_scale if global_scale is None else global_scale.view(1))
    return results


@lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...],
    matrix: tuple[int, int],
    row_stride: int,
    address: int,
    dtype: torch.dtype,
    format: str,
    axes: tuple[int, ...],
    scale_rounding: str | None,
    nonfinite: str,
    layout: str,
    arch: str,
    on_gpu: bool,
) -> tuple[Callable[..., Any], tuple[_Output, ...]]:
    """The kernel of a call and what it fills."""
    from . import compiled

    fmt, where = get_format(format), get_layout(layout)
    config = choose_config(
        matrix,
        row_stride,
        dtype,
        fmt,
        axes=axes,
        layout=layout,
        scale_rounding=scale_rounding,
        nonfinite=nonfinite,
        arch=arch,
        address=address,
    )
    outputs = []
    for axis in axes:
        data, scale = fmt.data_shape(shape, axis), fmt.scale_shape(shape, axis)
        outer = scale if axis == -1 else scale[::-1]
        kept = torch.uint8 if fmt.scale.nbytes == 1 else fmt.scale.dtype
        stored = scale if layout == "compact" else where.stored_shape((outer[0], outer[1]))
        outputs.append(
            _Output(
                data=(math.prod(data[:-1]), data[-1]),
                data_shape=data,
                element=fmt.element.dtype,
                scale=stored,
                scale_dtype=where.stored_dtype(kept),
            )
        )
    return (compiled.load if on_gpu else compiled.build)(config), tuple(outputs)


