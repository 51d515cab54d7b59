"""What a call of a kernel needs, found once for all calls alike: kernel, outputs, input views."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...dtypes import from_torch
from ...layouts import get_layout
from ..common.gpu import Gpu, Unsupported
from ..common.runtime import FLOATS, Described, gpu_of, missing
from .config import PANEL, PRODUCERS, AmaxConfig, Config, Request, choose_config
from .further import PLAIN, Further
from .outputs import Output, choose_output
from .refusals import why_not

__all__ = ["QuantizePlan", "as_matrix", "plan_amax", "plan_quantize", "unsupported"]


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
        self,
        inputs: tuple[Tensor, ...],
        global_scale: Tensor | None,
        offsets: Tensor | None = None,
        gather: Tensor | None = None,
        weights: tuple[Tensor | None, Tensor | None] = (None, None),
        further: Further = PLAIN,
    ) -> list[Any]:
        """Data and scales along rows, then along columns, as the kernel writes them: matrices that
        ``outputs`` shape; None where an axis is not asked for. ``weights``: of rows, and where
        sums go."""
        written: list[Any] = [None] * 4
        for output in self.outputs:
            written[output.first] = torch.empty_like(output.data)
            written[output.first + 1] = torch.empty_like(output.scale)
        # kernels read vectors
        offsets = offsets.contiguous() if self.grouped and offsets is not None else None
        of_rows = tuple([x for x in (gather, *weights) if x is not None]) or None
        applied = None if further is PLAIN else further.arguments(inputs[0].device)
        self.run(self.sources(*inputs), tuple(written), global_scale, offsets, of_rows, applied)
        return written

    def global_scale(
        self,
        inputs: tuple[Tensor, ...],
        weights: Tensor | None = None,
        further: Further = PLAIN,
    ) -> Tensor:
        """An fp32 scalar."""
        partials = inputs[0].new_empty(self.tiles, dtype=torch.int32)
        scale = inputs[0].new_empty((), dtype=torch.float32)
        applied = None if further is PLAIN else further.arguments(scale.device)
        self.run(self.sources(*inputs), partials, scale, weights, applied)
        return scale


def unsupported(x: Tensor, request: Request, gpu: Gpu | None = None) -> str:
    """Why the kernels cannot quantize ``x`` so; empty where they can."""
    gpu = gpu or gpu_of(x.device)
    return _unsupported(x.shape, x.stride(), x.dtype, x.device, request, gpu)


@lru_cache(maxsize=4096)
def _unsupported(
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    request: Request,
    gpu: Gpu | None,
) -> str:
    if missing():
        return missing()
    if gpu is None:
        return f"x is on {device}: the kernels run on CUDA devices"
    format, axes, layouts = request.fmt, request.axes, request.layouts
    compact = set(layouts) == {"compact"}
    matrix = request.producer != "load" or request.grouped or request.gather or not compact
    if len(shape) > 2 and matrix:
        return f"x has shape {tuple(shape)}: the kernels take matrices, or compact scales of more"
    if len(shape) < 2 and (matrix or -2 in axes or request.square):
        return f"x has shape {tuple(shape)}: blocks along columns need a matrix"
    if stride[-1] != 1 and shape[-1] > 1:
        return f"x has strides {stride}: not contiguous in the last dimension"
    if request.is_batch(shape):
        if as_matrix(shape[:-1], stride[:-1]) is None:
            return f"x has strides {stride}: its matrices do not lie at equal distances"
    elif as_matrix(shape, stride) is None:
        return f"x has strides {stride}: its rows do not lie at equal distances"
    if PRODUCERS[request.producer].parts > 1 and shape[-1] % (2 * PANEL):
        return f"x has shape {tuple(shape)}: half of its columns are no multiple of {PANEL}"
    if request.grouped and -2 in axes and format.block[0] > 1:
        return f"format {format.name} along axis -2: groups would cut its blocks"
    for axis in request.axes if request.hadamard else ():
        if shape[axis] % request.hadamard:
            return f"hadamard: dimension {axis} is {shape[axis]}, no multiple of {request.hadamard}"
    if dtype not in FLOATS:
        return f"dtype {dtype}: there are kernels for {', '.join(map(str, FLOATS))}"
    return why_not(request, gpu.arch)


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


def _as_batch(
    shape: Sequence[int], stride: Sequence[int]
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shape and strides with all dimensions but the last two taken as one."""
    found = as_matrix(shape[:-1], stride[:-1])
    assert found is not None  # else it is not supported
    matrices, rows, far = found
    columns, apart = shape[-1], stride[-2] if shape[-2] > 1 else -(-shape[-1] // 16) * 16
    return (matrices, rows, columns), (far if matrices > 1 else rows * apart, apart, 1)


@lru_cache(maxsize=4096)
def plan_quantize(
    inputs: tuple[Described, ...],
    device: torch.device,
    gpu: Gpu | None,
    request: Request,
    has_global_scale: bool,
    groups: int | None = None,
    rows: int | None = None,
) -> QuantizePlan:
    """The plan of a call of ``quantize``: of ``x`` and the other ``inputs`` of its producer, or of
    ``rows`` that are gathered."""
    shape = _check(inputs, device, gpu, request)
    if rows is not None:
        shape = (rows, *shape[1:])
    assert gpu is not None  # else it is not supported
    if request.fmt.has_global_scale and not has_global_scale:
        raise ValueError(f"global_scale: {request.format} needs one")
    # offsets change data along columns, and scales along rows in some layouts
    spread = any(get_layout(layout).spreads for layout in request.layouts)
    grouped = request.grouped and (-2 in request.axes or spread)
    config, views = _choose(inputs, request._replace(grouped=grouped), gpu, rows)
    groups = groups if grouped else None
    return QuantizePlan(
        run=gpu.load(config),
        views=views,
        outputs=tuple(
            choose_output(
                *(shape, request.fmt, axis, layout, device, groups),
                k_major=request.k_major,
                batched=config.batched,
            )
            for axis, layout in zip(request.axes, request.layouts, strict=True)
        ),
        grouped=grouped,
    )


@lru_cache(maxsize=4096)
def plan_amax(
    inputs: tuple[Described, ...], device: torch.device, gpu: Gpu | None, request: Request
) -> QuantizePlan:
    """The plan of a call of ``global_scale``."""
    room, request = request.scaling != "amax", request._replace(scaling="amax")
    _check(inputs, device, gpu, request)
    # a batch is one matrix here, whatever is transformed
    shape = _check(inputs, device, gpu, request._replace(axes=(-1,), hadamard=0))
    assert gpu is not None  # else it is not supported
    config, views = _choose(inputs, request._replace(axes=(), layouts=()), gpu)
    assert isinstance(config, AmaxConfig)
    config = replace(config, along=request.axes[0] if request.hadamard else -1, room=room)
    rows, columns = math.prod(shape[:-1]), shape[-1] // PRODUCERS[request.producer].parts
    return QuantizePlan(run=gpu.load(config), views=views, tiles=config.partials(rows, columns))


def _check(
    inputs: tuple[Described, ...], device: torch.device, gpu: Gpu | None, request: Request
) -> tuple[int, ...]:
    """The shape of what is quantized; Unsupported if nothing can do that."""
    x = inputs[0]
    for i, (shape, stride, dtype, _) in enumerate(inputs):
        if dtype != x[2]:
            raise ValueError(f"quantize: x has {x[2]}, another input {dtype}; cast one of them")
        given = request._replace(producer="load") if i else request
        reason = _unsupported(shape, stride, dtype, device, given, gpu)
        if reason:
            raise Unsupported(reason)
    halved = PRODUCERS[request.producer].sources == 2
    return (*x[0][:-1], x[0][-1] // 2) if halved else tuple(x[0])


def _choose(
    inputs: tuple[Described, ...], request: Request, gpu: Gpu, gathered: int | None = None
) -> tuple[Config, Any]:
    """The kernel, for so many rows that are ``gathered``, and views of its sources."""
    (shape, stride, dtype, address), *_ = inputs
    if request.is_batch(shape):
        batch = _as_batch(shape, stride)
        (count, rows, columns), strides = batch
        sources = [(address, step * dtype.itemsize) for step in strides[:2]]
        given = sources, from_torch(dtype), request, gpu
        config = choose_config((rows, columns), *given, batch=count)
        same = (tuple(shape), tuple(stride)) == batch
        return config, None if same else ((0, (*batch, 0)),)
    found: list[tuple[int, tuple[Any, Any, int]]] = []
    producer = PRODUCERS[request.producer]
    for i, (shape, stride, _, _) in enumerate(inputs):
        matrix = as_matrix(shape, stride)
        assert matrix is not None  # else it is not supported
        rows, columns, apart = matrix
        halves = 1 if i else producer.sources - producer.inputs + 1
        width = columns // halves
        found += [(i, ((rows, width), (apart, 1), part * width)) for part in range(halves)]
    sources = [
        (inputs[i][3] + offset * dtype.itemsize, apart[0] * dtype.itemsize)
        for i, (_, apart, offset) in found
    ]
    rows, columns = found[0][1][0]
    matrices = rows if gathered is None else gathered, columns
    config = choose_config(matrices, sources, from_torch(dtype), request, gpu)
    whole = all(
        (view[0], view[1]) == (tuple(tensor[0]), tensor[1])
        for (_, view), tensor in zip(found, inputs, strict=False)
    )
    return config, None if whole and request.producer == "load" else tuple(found)
