"""Values of quantized tensors on a GPU: what a call needs, found once, and the call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dtypes import from_torch
from ...formats import Format, get_format
from ...layouts import get_layout
from ...memory import as_bytes
from ..common.gpu import Gpu, Unsupported
from ..common.runtime import FLOATS, Described, describe, gpu_of, require_gpu
from ..common.template import template
from .dequantize_config import STORE, DequantizeRequest, choose_dequantize, why_not
from .dequantize_views import View, as_matrices, is_contiguous, turn

__all__ = [
    "DequantizeCall",
    "DequantizePlan",
    "Stored",
    "dequantize",
    "plan_dequantize",
]

_MOST_MATRICES = 65535  # of a grid
_MOST = 1 << 31  # what 32 bits count


@dataclass(frozen=True, slots=True)
class DequantizePlan:
    """What a call needs, found once for all calls alike.

    ``data``, ``scale``, ``out``: what the kernel takes of each, where it is not all as it is.
    ``template``: of the output as it lies in memory. ``turned``:
    data lies column by column, and so will the output.
    """

    run: Callable[..., Any] | None
    data: View | None
    scale: View | None
    out: View
    template: Tensor
    turned: bool

    def write(self, data: Tensor, scale: Tensor, out: Tensor, global_scale: Tensor | None) -> None:
        """Data and scales as bytes; ``out`` like ``template``."""
        if self.run is not None:
            self.run(
                data if self.data is None else data.as_strided(*self.data),
                scale if self.scale is None else scale.as_strided(*self.scale),
                out if out.shape == self.out[0] else out.view(self.out[0]),
                global_scale,
            )


class Stored(NamedTuple):
    """What data and scales stand for.

    Attributes:
        format: its name.
        shape: that of the tensor that was quantized.
        axis: of the contraction.
        layout: of the scales.
    """

    format: str
    shape: tuple[int, ...]
    axis: int = -1
    layout: str = "compact"


def dequantize(
    data: Tensor,
    scale: Tensor,
    stored: Stored,
    *,
    global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    gpu: Gpu | None = None,
) -> Tensor:
    """``reference.dequantize`` of what is ``stored`` so, rounded once to ``dtype``.

    A NaN is 0x7FC0, 0x7E00 or 0x7FC00000, as from the CPU kernel; torch's casts to bfloat16 write
    another one on each processor.

    Args:
        data: ``Format.data_shape(shape, axis)``, contiguous in one of its last two dimensions; so
            is the result, in the same one.
        scale: as the layout stores it; compact ones may have any strides.
        global_scale: one fp32 value; where it is left out, its factor is.
        dtype: bfloat16, float16 or float32.
        out: takes the result; shares no memory with ``data`` and ``scale``.
        gpu: to choose the kernel for where ``data`` is on a CPU, for the emulator.

    Raises Unsupported, a ValueError, where there is no kernel, and ValueError for parts that do not
    fit each other.
    """
    plan = plan_dequantize(
        DequantizeCall(
            describe(data),
            describe(scale),
            describe(out),
            data.device,
            gpu or gpu_of(data.device),
            *stored,
            None if global_scale is None else global_scale.numel(),
            dtype,
        )
    )
    made = torch.empty_like(plan.template) if out is None else out.mT if plan.turned else out
    if global_scale is not None and global_scale.ndim:
        global_scale = global_scale.view(())
    plan.write(as_bytes(data), as_bytes(scale), made, global_scale)
    if out is not None:
        return out
    return made.mT if plan.turned else made


class DequantizeCall(NamedTuple):
    """All that decides which kernel dequantizes, and how it is launched.

    Attributes:
        gpu: None where kernels do not run.
        global_scales: how many, where there is a tensor of them.
    """

    data: Described
    scale: Described
    out: Described | None
    device: torch.device
    gpu: Gpu | None
    format: str
    shape: tuple[int, ...]
    axis: int = -1
    layout: str = "compact"
    global_scales: int | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def fmt(self) -> Format:
        return get_format(self.format)


@lru_cache(maxsize=4096)
def plan_dequantize(call: DequantizeCall) -> DequantizePlan:
    """The plan of a call of ``dequantize``; raises as it does."""
    gpu = _check(call)
    data, scale, out, shape, fmt = call.data, call.scale, call.out, call.shape, call.fmt
    turned = len(shape) > 1 and data[1][-1] != 1 and data[1][-2] == 1
    made = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
    if out is not None:
        _check_out(out, shape, call.dtype, turned)
    kept = template(made, call.dtype, call.device)
    if 0 in shape:
        return DequantizePlan(None, None, None, (made, ()), kept, turned)
    down = (call.axis == -2) != turned
    if down and fmt.element.bits < 8:
        raise Unsupported(
            f"data has strides {data[1]}: it is packed along axis {call.axis}, not so"
        )
    lines = turn(data[:2]) if turned else data[:2]
    views = as_matrices(lines, scale[:2], made, fmt, down, turned)
    if views is None:
        raise Unsupported(
            f"data has strides {data[1]}, scale {scale[1]}: leading dimensions cannot be one"
        )
    read, found, written = views
    _check_sizes(shape, views)
    request = DequantizeRequest(
        call.format,
        from_torch(call.dtype),
        call.layout,
        call.axis,
        down,
        call.global_scales is not None,
    )
    addresses = data[3], scale[3], 0 if out is None else out[3]
    config = choose_dequantize(request, views, addresses, gpu)
    return DequantizePlan(
        run=gpu.load(config),
        data=None if read == data[:2] else read,
        scale=None if found == scale[:2] else found,
        out=written,
        template=kept,
        turned=turned,
    )


def _check(call: DequantizeCall) -> Gpu:
    """What dequantizes; raises where there is no kernel, or parts do not fit each other."""
    format, shape, axis, layout, gpu = call.fmt, call.shape, call.axis, call.layout, call.gpu
    data, scale, name = call.data, call.scale, call.format
    where = get_layout(layout)
    gpu = require_gpu("data", call.device, gpu)
    if call.dtype not in FLOATS:
        raise Unsupported(f"dtype {call.dtype}: there are kernels for {_listed(FLOATS)}")
    if reason := why_not(format, layout):
        raise Unsupported(reason)
    if layout != "compact" and len(shape) != 2:
        raise Unsupported(f"layout {layout}: holds the scales of a matrix, shape is {shape}")
    if len(shape) < -axis:
        raise ValueError(f"axis: got {axis} for {len(shape)} dimension(s)")
    if call.global_scales not in (None, 1):
        raise ValueError(f"global_scale: got {call.global_scales} values; expected one, or None")
    want = format.data_shape(shape, axis)
    if data[0] != want or data[2].itemsize != 1:
        raise ValueError(
            f"data: got {tuple(data[0])} {data[2]}; {name} stores {shape} along axis {axis} as "
            f"{want} {format.element.dtype}"
        )
    stored = format.scale_shape(shape, axis)
    if layout != "compact":
        rows, blocks = stored if axis == -1 else stored[::-1]
        stored = where.stored_shape((rows, blocks))
    size = where.stored_dtype(format.scale.dtype).itemsize
    if scale[0] != stored or scale[2].itemsize != size:
        raise ValueError(
            f"scale: got {tuple(scale[0])} {scale[2]}; {name} in layout {layout} for {shape} along "
            f"axis {axis} is {tuple(stored)}, {size} byte(s) each"
        )
    if layout != "compact" and not is_contiguous(scale[0], scale[1]):
        raise Unsupported(f"scale has strides {scale[1]}: in layout {layout} it is contiguous")
    if 1 not in data[1][-2:]:
        raise Unsupported(f"data has strides {data[1]}: not contiguous in a dimension")
    return gpu


def _check_out(out: Described, shape: tuple[int, ...], dtype: torch.dtype, turned: bool) -> None:
    """``out`` must be dense, and lie in memory as the data does."""
    if tuple(out[0]) != shape or out[2] != dtype:
        raise ValueError(f"out: got {tuple(out[0])} {out[2]}; expected {shape} {dtype}")
    if not is_contiguous(*(turn(out[:2]) if turned else out[:2])):
        order = "column by column (mT of a contiguous tensor)" if turned else "contiguous"
        raise ValueError(f"out: has strides {out[1]}; expected {order}, as the data is")


def _check_sizes(shape: tuple[int, ...], views: Sequence[View]) -> None:
    """Unsupported where the kernel would count too far."""
    if math.prod(views[2][0][:-2]) > _MOST_MATRICES:
        raise Unsupported(f"shape {shape}: more than {_MOST_MATRICES} matrices")
    lengths = [n for view in views for n in view[0]]
    strides = [4 * n for view in views for n in view[1][-2:]]
    if max(*lengths, *strides, math.prod(views[2][0][-2:]) // STORE) >= _MOST:
        raise Unsupported(f"shape {shape}: the kernel counts a matrix's columns and blocks to 2^31")


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names))
