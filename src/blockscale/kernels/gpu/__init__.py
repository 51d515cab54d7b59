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
    """What a call allocates for one axis, and the shapes in which it returns it.

    ``data`` and ``scale`` are one item each, expanded: empty_like of them is the fastest way to
    allocate.
    """

    data: Tensor  # bytes, as a matrix
    data_shape: tuple[int, ...]
    element: torch.dtype
    scale: Tensor
    scale_shape: tuple[int, ...]


@lru_cache
def architecture(index: int | None) -> str:
    """Target of a CUDA device: "sm_90a", "sm_100a", or another one's without a kernel."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}" + "a" * (major in (9, 10))


def unsupported(
    x: Tensor, format: Format, axes: Sequence[int], layout: str, arch: str | None = None
) -> str:
    """Why the kernels cannot quantize ``x`` so; empty where they can."""
    return _unsupported(
        x.shape, x.stride(), x.dtype, x.device, format.name, tuple(axes), layout, arch
    )


@lru_cache(maxsize=4096)
def _unsupported(
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    format: str,
    axes: tuple[int, ...],
    layout: str,
    arch: str | None,
) -> str:
    if find_spec("cutlass") is None or find_spec("tvm_ffi") is None:
        return "CuTe DSL is not installed: pip install 'blockscale[cuda]'"
    if arch is None:
        if device.type != "cuda":
            return f"x is on {device}: the kernels run on CUDA devices"
        arch = architecture(device.index)
    if len(shape) > 2 and (layout != "compact" or -2 in axes):
        return f"x has shape {tuple(shape)}: the kernels take matrices, or rows with compact scales"
    if len(shape) < 2 and -2 in axes:
        return f"x has shape {tuple(shape)}: blocks along columns need a matrix"
    if stride[-1] != 1 and shape[-1] > 1:
        return f"x has strides {stride}: not contiguous in the last dimension"
    if _matrix(shape, stride) is None:
        return f"x has strides {stride}: its rows do not lie at equal distances"
    return why_not(get_format(format), axes, layout, arch, dtype)


def _matrix(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, int, int] | None:
    """Rows, columns and the distance between rows of all dimensions but the last taken as one."""
    rows, apart = 1, 0
    for n, step in reversed(list(zip(shape[:-1], stride[:-1], strict=True))):
        if n == 1:
            continue
        if rows > 1 and step != rows * apart:
            return None
        rows, apart = rows * n, apart if rows > 1 else step
    columns = shape[-1]
    return rows, columns, apart if rows > 1 else -(-columns // 16) * 16


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
    run, outputs, matrix = _plan(
        x.shape,
        x.stride(),
        x.data_ptr() % 16,
        x.dtype,
        x.device,
        format.name,
        axes,
        scale_rounding,
        nonfinite,
        layout,
        arch,
        global_scale is None,
    )
    results: list[tuple[Tensor, Tensor]] = []
    arguments: list[Tensor | None] = [None] * 4
    for axis, output in zip(axes, outputs, strict=True):
        data, scale = torch.empty_like(output.data), torch.empty_like(output.scale)
        arguments[2 * (axis == -2) : 2 * (axis == -2) + 2] = data, scale
        if len(output.data_shape) != 2:
            data, scale = data.view(output.data_shape), scale.view(output.scale_shape)
        results.append(
            (data if output.element == torch.uint8 else data.view(output.element), scale)
        )
    if matrix is not None:
        x = x.as_strided(*matrix)
    run(x, *arguments, None if global_scale is None else global_scale.view(1))
    return results


@lru_cache(maxsize=4096)
def _plan(
    shape: torch.Size,
    stride: tuple[int, ...],
    address: int,
    dtype: torch.dtype,
    device: torch.device,
    format: str,
    axes: tuple[int, ...],
    scale_rounding: str | None,
    nonfinite: str,
    layout: str,
    arch: str | None,
    no_global_scale: bool,
) -> tuple[Callable[..., Any], tuple[_Output, ...], tuple[Any, Any] | None]:
    """The kernel of a call, what it fills, and shape and strides of ``x`` where it is no matrix."""
    from . import compiled

    reason = _unsupported(shape, stride, dtype, device, format, axes, layout, arch)
    if reason:
        raise ValueError(f"quantize: {reason}")
    fmt, where = get_format(format), get_layout(layout)
    if fmt.has_global_scale and no_global_scale:
        raise ValueError(f"global_scale: {fmt.name} needs one")
    found = _matrix(shape, stride)
    assert found is not None  # else it is not supported
    rows, columns, apart = found
    config = choose_config(
        (rows, columns),
        apart,
        dtype,
        fmt,
        axes=axes,
        layout=layout,
        scale_rounding=scale_rounding,
        nonfinite=nonfinite,
        arch=arch or architecture(device.index),
        address=address,
    )
    outputs = []
    for axis in axes:
        data, scale = fmt.data_shape(shape, axis), fmt.scale_shape(shape, axis)
        outer = scale if axis == -1 else scale[::-1]
        kept = torch.uint8 if fmt.scale.nbytes == 1 else fmt.scale.dtype
        stored = scale if layout == "compact" else where.stored_shape((outer[0], outer[1]))
        flat = stored if len(shape) == 2 else (math.prod(scale[:-1]), scale[-1])
        outputs.append(
            _Output(
                data=_like((math.prod(data[:-1]), data[-1]), torch.uint8, device),
                data_shape=data,
                element=fmt.element.dtype,
                scale=_like(flat, where.stored_dtype(kept), device),
                scale_shape=stored,
            )
        )
    kernel = (compiled.load if device.type == "cuda" else compiled.build)(config)
    matrix = (
        None if len(shape) == 2 and stride[1] == 1 and rows > 1 else ((rows, columns), (apart, 1))
    )
    return kernel, tuple(outputs), matrix


def _like(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(1, dtype=dtype, device=device).expand(tuple(shape))
