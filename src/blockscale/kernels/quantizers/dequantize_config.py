"""What to compile to dequantize: a pure function of shapes, types and target, and its result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...formats import Format, get_format
from ...layouts import get_layout
from ..common.gpu import Gpu
from .dequantize_views import View

__all__ = [
    "STORE",
    "THREADS",
    "DequantizeConfig",
    "DequantizeRequest",
    "choose_dequantize",
    "why_not",
]

THREADS = 256  # of a block
STORE = 16  # bytes of a thread's output in a row
_MOST_ROWS = 8
_RESIDENT = 1024  # threads of a multiprocessor whose loads keep it busy


class DequantizeRequest(NamedTuple):
    """What is asked of a kernel: fields of :class:`DequantizeConfig`."""

    format: str
    dtype: np.dtype
    layout: str
    axis: int
    down: bool
    has_global_scale: bool


@dataclass(frozen=True, slots=True)
class DequantizeConfig:
    """A kernel: all that its code depends on.

    Attributes:
        dtype: of the output.
        layout: of the scales.
        axis: of the contraction in the tensor whose compact scales are given.
        down: blocks lie down the columns of what is read; else along its rows.
        batched: there are several matrices.
        rows: of a thread; at most those of a block where blocks lie down columns.
        load, store, scale_load: bytes of an access to data, output and scales.
    """

    arch: str
    format: str
    dtype: np.dtype
    layout: str
    axis: int
    down: bool
    batched: bool
    has_global_scale: bool
    rows: int
    load: int
    store: int
    scale_load: int

    @property
    def columns(self) -> int:
        """Of a thread."""
        return STORE // self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Of the elements in a row of a thread."""
        return self.columns * get_format(self.format).element.bits // 8

    @property
    def outer(self) -> int:
        """Neighbours across the contraction whose scales a thread needs."""
        return self.columns if self.down else self.rows


def why_not(format: Format, layout: str) -> str:
    """Why no kernel dequantizes such data and scales; empty where one does."""
    if format.element.bits == 6:
        return f"format {format.name}: no kernel unpacks 6-bit elements"
    if format.scale.nbytes not in get_layout(layout).itemsize:
        return f"layout {layout}: does not hold scales of {format.name}"
    return ""


def choose_dequantize(
    request: DequantizeRequest,
    views: tuple[View, View, View],
    addresses: tuple[int, int, int],
    gpu: Gpu,
) -> DequantizeConfig:
    """The kernel for data, scales and an output that lie so, at addresses modulo 16."""
    dtype, layout, axis = request.dtype, request.layout, request.axis
    format, (data, scale, (out, _)) = get_format(request.format), views
    columns = STORE // dtype.itemsize
    threads = math.prod(out[:-1]) * -(-out[-1] // columns)
    rows = _MOST_ROWS
    while rows > 1 and threads < rows * _RESIDENT * gpu.multiprocessors:
        rows //= 2
    nbytes = columns * format.element.bits // 8
    outer = columns if request.down else rows
    return DequantizeConfig(
        arch=gpu.arch,
        **request._asdict(),
        batched=len(out) > 2,
        rows=rows,
        load=math.gcd(nbytes, data[0][-1], *_steps(data, -1), addresses[0]),
        store=math.gcd(STORE, out[-1] * dtype.itemsize, addresses[2]),
        scale_load=_scale_load(scale, addresses[1], format, layout, axis, outer),
    )


def _scale_load(
    scale: View, address: int, format: Format, layout: str, axis: int, count: int
) -> int:
    """The widest load of neighbours across the contraction, of which a thread needs ``count``."""
    size, shape, stride = format.scale.nbytes, *scale
    outer = {"compact": -2 if axis == -1 else -1, "sm90": -1}.get(layout)
    if outer is None or format.block[0] > 1 or (stride[outer] != 1 and shape[outer] > 1):
        return size
    lengths = count, shape[outer], *_steps(scale, outer)
    return math.gcd(STORE, address, *(n * size for n in lengths))


def _steps(view: View, but: int) -> list[int]:
    """Strides of all dimensions but one that have several items."""
    shape, stride = map(list, view)
    del shape[but], stride[but]
    return [step for n, step in zip(shape, stride, strict=True) if n > 1]
