"""What a call of a kernel needs, found once for all calls alike: kernel, outputs, input views."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...formats import Format, get_format
from ..common.runtime import Described, Unsupported, architecture, get_kernel, missing
from .config import PANEL, PRODUCERS, Config, choose_config, why_not
from .outputs import Output, choose_output

__all__ = [
    "QuantizePlan",
    "as_matrix",
    "plan_amax",
    "plan_quantize",
    "unsupported",
]


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """What calls alike launch.

    ``views`` has shape, strides and offset of each source, where it is not a whole input.
    """

    run: Callable[..., Any]
    views: tuple[tuple[int, tuple[Any, Any, int]], ...] | None
    outputs: tuple[Output, ...] = ()
    grouped: bool = False
    tiles: int = 0

    def sources(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.views is None:
            return inputs
        return tuple(
            inputs[i].as_strided(shape, stride, inputs[i].storage_offset() + offset)
            for i, (shape, stride, offset) in self.views
        )

    def quantize(
        self, inputs: tuple[Tensor, ...], global_scale: Tensor | None, offsets: Tensor | None
    ) -> list[Any]:
        """Data and scales along rows, then along columns, as the kernel writes them: matrices that
        ``outputs`` shape; None where an axis is not asked for."""
        written: list[Any] = [None] * 4
        for output in self.outputs:
            written[output.first] = torch.empty_like(output.data)
            written[output.first + 1] = torch.empty_like(output.scale)
        offsets = offsets if self.grouped else None
        self.run(self.sources(*inputs), *written, global_scale, offsets)
        return written

    def global_scale(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """An fp32 scalar."""
        partials = inputs[0].new_empty(self.tiles, dtype=torch.int32)
        scale = inputs[0].new_empty((), dtype=torch.float32)
        self.run(self.sources(*inputs), partials, scale)
        return scale


def unsupported(
    x: Tensor,
    format: Format,
    axes: Sequence[int],
    layouts: Sequence[str],
    *,
    grouped: bool = False,
    producer: str = "load",
    k_major: bool = False,
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
        k_major,
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
    k_major: bool,
    arch: str | None,
) -> str:
    if missing():
        return missing()
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
    if as_matrix(shape, stride) is None:
        return f"x has strides {stride}: its rows do not lie at equal distances"
    if producer == "swiglu_backward" and shape[-1] % (2 * PANEL):
        return f"x has shape {tuple(shape)}: half of its columns are no multiple of {PANEL}"
    fmt = get_format(format)
    if grouped and -2 in axes:
        if fmt.element.bits < 8 or fmt.block[0] > 1:
            return f"format {format} along axis -2: groups would cut its bytes or blocks"
        if layouts[axes.index(-2)] != "compact":
            return "layout of axis -2: scales of groups along columns are compact"
        if k_major:
            return "k_major: no kernel stores groups along the contraction column by column"
    return why_not(fmt, axes, layouts, arch, dtype)


def as_matrix(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, int, int] | None:
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
    k_major: bool,
    arch: str | None,
) -> QuantizePlan:
    """The plan of a call of ``quantize``."""
    fmt, grouped = get_format(format), groups is not None
    shape = _check(x, others, device, fmt, axes, layouts, grouped, producer, k_major, arch)
    if fmt.has_global_scale and not has_global_scale:
        raise ValueError(f"global_scale: {fmt.name} needs one")
    # offsets change neither data nor compact scales along rows
    grouped = grouped and (-2 in axes or set(layouts) != {"compact"})
    given: dict[str, Any] = {"scale_rounding": scale_rounding, "nonfinite": nonfinite}
    given |= {"axes": axes, "layouts": layouts, "grouped": grouped, "k_major": k_major}
    config, views = _choose(x, others, device, fmt, producer, arch, **given)
    return QuantizePlan(
        run=get_kernel(config, device),
        views=views,
        outputs=tuple(
            choose_output(shape, fmt, axis, layout, device, groups if grouped else None, k_major)
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
) -> QuantizePlan:
    """The plan of a call of ``global_scale``."""
    fmt = get_format(format)
    shape = _check(x, others, device, fmt, (-1,), ("compact",), False, producer, False, arch)
    config, views = _choose(x, others, device, fmt, producer, arch, axes=(), layouts=())
    rows, columns = math.prod(shape[:-1]), shape[-1] // PRODUCERS[producer].parts
    tiles = -(-rows // config.tile_rows) * -(-columns // config.tile_columns)
    return QuantizePlan(run=get_kernel(config, device), views=views, tiles=tiles)


def _check(
    x: Described,
    others: tuple[Described, ...],
    device: torch.device,
    format: Format,
    axes: tuple[int, ...],
    layouts: tuple[str, ...],
    grouped: bool,
    producer: str,
    k_major: bool,
    arch: str | None,
) -> tuple[int, ...]:
    """The shape of what is quantized; Unsupported if the kernels cannot."""
    for i, (shape, stride, dtype, _) in enumerate((x, *others)):
        kind = "load" if i else producer
        if dtype != x[2]:
            raise ValueError(f"quantize: x has {x[2]}, another input {dtype}; cast one of them")
        reason = _unsupported(
            shape, stride, dtype, device, format.name, axes, layouts, grouped, kind, k_major, arch
        )
        if reason:
            raise Unsupported(reason)
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
        matrix = as_matrix(shape, stride)
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
