"""What a call of a kernel needs, found once for all calls alike: kernel, outputs, input views."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...formats import Format, get_format
from ...layouts import Grouped, get_layout
from .config import PANEL, PRODUCERS, Config, choose_config, why_not

__all__ = ["architecture", "plan_amax", "plan_quantize", "unsupported"]

Described = tuple[torch.Size, tuple[int, ...], torch.dtype, int]  # shape, strides, dtype, address


@dataclass(frozen=True, slots=True)
class _Output:
    """What a call allocates for one axis, and the shapes in which it returns it.

    ``data`` and ``scale`` are one item each, expanded: empty_like of them is the fastest way to
    allocate. ``first`` is the position of ``data`` among the kernel's arguments.
    """

    first: int
    data: Tensor  # bytes, as a matrix
    data_shape: tuple[int, ...]
    element: torch.dtype
    scale: Tensor
    scale_shape: tuple[int, ...]
    turned: bool  # data is stored column by column

    def shaped(self, data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.data_shape) != 2:
            data, scale = data.view(self.data_shape), scale.view(self.scale_shape)
        data = data.mT if self.turned else data
        return data if self.element == torch.uint8 else data.view(self.element), scale


@dataclass(frozen=True, slots=True)
class _Plan:
    """``views`` has shape, strides and offset of each source, where it is not a whole input."""

    run: Callable[..., Any]
    views: tuple[tuple[int, tuple[Any, Any, int]], ...] | None
    outputs: tuple[_Output, ...] = ()
    grouped: bool = False
    tiles: int = 0

    def sources(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.views is None:
            return inputs
        return tuple(
            inputs[i].as_strided(shape, stride, inputs[i].storage_offset() + offset)
            for i, (shape, stride, offset) in self.views
        )


@lru_cache
def architecture(index: int | None) -> str:
    """Target of a CUDA device: "sm_90a", "sm_100a", or another one's without a kernel."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}" + "a" * (major in (9, 10))


def unsupported(
    x: Tensor,
    format: Format,
    axes: Sequence[int],
    layouts: Sequence[str],
    *,
    grouped: bool = False,
    producer: str = "load",
    arch: str | None = None,
) -> str:
    """Why the kernels cannot quantize ``x`` so; empty where they can."""
    return _unsupported(
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        format.name,
        tuple(axes),
        tuple(layouts),
        grouped,
        producer,
        arch,
    )


@lru_cache(maxsize=4096)
def _unsupported(
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    format: str,
    axes: tuple[int, ...],
    layouts: tuple[str, ...],
    grouped: bool,
    producer: str,
    arch: str | None,
) -> str:
    if find_spec("cutlass") is None or find_spec("tvm_ffi") is None:
        return "CuTe DSL is not installed: pip install 'blockscale[cuda]'"
    if arch is None:
        if device.type != "cuda":
            return f"x is on {device}: the kernels run on CUDA devices"
        arch = architecture(device.index)
    matrix = producer != "load" or grouped or set(layouts) != {"compact"} or -2 in axes
    if len(shape) > 2 and matrix:
        return f"x has shape {tuple(shape)}: the kernels take matrices, or rows with compact scales"
    if len(shape) < 2 and matrix:
        return f"x has shape {tuple(shape)}: blocks along columns need a matrix"
    if stride[-1] != 1 and shape[-1] > 1:
        return f"x has strides {stride}: not contiguous in the last dimension"
    if _matrix(shape, stride) is None:
        return f"x has strides {stride}: its rows do not lie at equal distances"
    if producer == "swiglu_backward" and shape[-1] % (2 * PANEL):
        return f"x has shape {tuple(shape)}: half of its columns are no multiple of {PANEL}"
    fmt = get_format(format)
    if grouped and -2 in axes and fmt.element.bits < 8:
        return f"format {format} along axis -2: groups would cut its bytes"
    return why_not(fmt, axes, layouts, arch, dtype)


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


@lru_cache(maxsize=4096)
def plan_quantize(
    x: Described,
    others: tuple[Described, ...],
    device: torch.device,
    format: str,
    axes: tuple[int, ...],
    layouts: tuple[str, ...],
    scale_rounding: str | None,
    nonfinite: str,
    has_global_scale: bool,
    groups: int | None,
    producer: str,
    arch: str | None,
) -> _Plan:
    """The plan of a call of ``quantize``."""
    fmt, grouped = get_format(format), groups is not None
    shape = _check(x, others, device, fmt, axes, layouts, grouped, producer, arch)
    if fmt.has_global_scale and not has_global_scale:
        raise ValueError(f"global_scale: {fmt.name} needs one")
    # offsets change neither data nor compact scales along rows
    grouped = grouped and (-2 in axes or set(layouts) != {"compact"})
    given = {"scale_rounding": scale_rounding, "nonfinite": nonfinite, "grouped": grouped}
    config, views = _choose(
        x, others, device, fmt, producer, arch, axes=axes, layouts=layouts, **given
    )
    return _Plan(
        run=_kernel(config, device),
        views=views,
        outputs=tuple(
            _output(shape, fmt, axis, layout, device, groups if grouped else None)
            for axis, layout in zip(axes, layouts, strict=True)
        ),
        grouped=grouped,
    )


@lru_cache(maxsize=4096)
def plan_amax(
    x: Described,
    others: tuple[Described, ...],
    device: torch.device,
    format: str,
    producer: str,
    arch: str | None,
) -> _Plan:
    """The plan of a call of ``global_scale``."""
    fmt = get_format(format)
    shape = _check(x, others, device, fmt, (-1,), ("compact",), False, producer, arch)
    config, views = _choose(x, others, device, fmt, producer, arch, axes=(), layouts=())
    rows, columns = math.prod(shape[:-1]), shape[-1] // PRODUCERS[producer].parts
    tiles = -(-rows // config.tile_rows) * -(-columns // config.tile_columns)
    return _Plan(run=_kernel(config, device), views=views, tiles=tiles)


def _check(
    x: Described,
    others: tuple[Described, ...],
    device: torch.device,
    format: Format,
    axes: tuple[int, ...],
    layouts: tuple[str, ...],
    grouped: bool,
    producer: str,
    arch: str | None,
) -> tuple[int, ...]:
    """The shape of what is quantized; ValueError if the kernels cannot."""
    for i, (shape, stride, dtype, _) in enumerate((x, *others)):
        kind = "load" if i else producer
        if dtype != x[2]:
            raise ValueError(f"quantize: x has {x[2]}, another input {dtype}; cast one of them")
        reason = _unsupported(
            shape, stride, dtype, device, format.name, axes, layouts, grouped, kind, arch
        )
        if reason:
            raise ValueError(f"quantize: {reason}")
    halved = producer == "swiglu"
    return (*x[0][:-1], x[0][-1] // 2) if halved else tuple(x[0])


def _choose(
    x: Described,
    others: tuple[Described, ...],
    device: torch.device,
    format: Format,
    producer: str,
    arch: str | None,
    **given: Any,
) -> tuple[Config, Any]:
    """The kernel, and views of its sources."""
    size = x[2].itemsize
    found: list[tuple[int, tuple[Any, Any, int]]] = []
    for i, (shape, stride, _, _) in enumerate((x, *others)):
        matrix = _matrix(shape, stride)
        assert matrix is not None  # else it is not supported
        rows, columns, apart = matrix
        halves = 2 if producer != "load" and i == 0 else 1
        width = columns // halves
        found += [(i, ((rows, width), (apart, 1), part * width)) for part in range(halves)]
    addresses = [(x, *others)[i][3] + view[2] * size for i, view in found]
    shape = found[0][1][0]
    config = choose_config(
        shape,
        [(a, view[1][0] * size) for a, (_, view) in zip(addresses, found, strict=True)],
        x[2],
        format,
        arch=arch or architecture(device.index),
        producer=producer,
        **given,
    )
    whole = all(
        (view[0], view[1]) == (tuple(tensor[0]), tensor[1])
        for (_, view), tensor in zip(found, (x, *others), strict=False)
    )
    return config, None if whole and producer == "load" else tuple(found)


def _kernel(config: Config, device: torch.device) -> Callable[..., Any]:
    from . import compiled

    if device.type != "cuda":
        return compiled.build(config)
    kernel = compiled.load(config)
    return kernel if torch.cuda.device_count() == 1 else partial(_run_on, device, kernel)


def _run_on(device: torch.device, kernel: Callable[..., Any], *args: Any) -> None:
    """Launches go to the current device."""
    with torch.cuda.device(device):
        kernel(*args)


def _output(
    shape: tuple[int, ...],
    format: Format,
    axis: int,
    layout: str,
    device: torch.device,
    groups: int | None,
) -> _Output:
    k_groups = groups if groups is not None and axis == -2 else 0
    data = format.data_shape(shape, axis, k_groups)
    scale = format.scale_shape(shape, axis, k_groups)
    outer = (scale[0], scale[-1]) if axis == -1 else (scale[-1], scale[0])
    where, kept = get_layout(layout), format.scale.dtype
    kept = torch.uint8 if format.scale.nbytes == 1 else kept
    stored: tuple[int, ...] = scale
    if layout != "compact":
        grouped = groups is not None and axis == -1
        stored = (
            Grouped(where).stored_shape(outer, groups or 0)
            if grouped
            else where.stored_shape(outer)
        )
    flat = stored if len(shape) == 2 else (math.prod(scale[:-1]), scale[-1])
    turned = axis == -2 and format.element.bits < 8
    matrix = (math.prod(data[:-1]), data[-1])
    return _Output(
        first=2 * (axis == -2),
        data=_like(matrix[::-1] if turned else matrix, torch.uint8, device),
        data_shape=data,
        element=format.element.dtype,
        scale=_like(flat, where.stored_dtype(kept), device),
        scale_shape=stored,
        turned=turned,
    )


def _like(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(1, dtype=dtype, device=device).expand(tuple(shape))
