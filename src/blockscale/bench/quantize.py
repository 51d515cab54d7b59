"""Quantizers against the device's own copy at the same bytes, and against what torchao has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ..formats import get_format
from ..kernels import gpu
from .timing import Timer

__all__ = ["CASES", "PEERS", "SHAPES", "Case", "Row", "draw", "measure"]

SHAPES = ((16384, 16384), (16384, 7168), (32768, 2048))
PEERS = ("torchao",)


@dataclass(frozen=True, slots=True)
class Case:
    """A way to quantize."""

    format: str
    axes: tuple[int, ...]
    layout: str
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        along = {(-1,): "rows", (-2,): "columns", (-1, -2): "both"}[self.axes]
        return f"{self.format} {along}, {self.layout}, {str(self.dtype).removeprefix('torch.')}"

    def nbytes(self, rows: int, columns: int) -> float:
        """Bytes that must move: the input once, data and scales for each axis."""
        fmt = get_format(self.format)
        each = fmt.element.bits / 8 + fmt.scale.nbytes / (fmt.block[0] * fmt.block[1])
        return rows * columns * (self.dtype.itemsize + len(self.axes) * each)


CASES = (
    Case("mxfp8", (-1,), "tcgen05"),
    Case("mxfp8", (-1,), "compact"),
    Case("mxfp8", (-2,), "tcgen05"),
    Case("mxfp8", (-1, -2), "tcgen05"),
    Case("mxfp8", (-1, -2), "compact"),
    Case("mxfp8", (-1,), "tcgen05", torch.float32),
    Case("mxfp4", (-1,), "tcgen05"),
    Case("nvfp4", (-1,), "tcgen05"),
    Case("fp8_1x128", (-1,), "sm90"),
    Case("fp8_1x128", (-2,), "sm90"),
    Case("fp8_1x128", (-1, -2), "sm90"),
    Case("fp8_128x128", (-1,), "compact"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement; ``of_copy`` is the copy's time at the same bytes over this one."""

    rows: int
    columns: int
    case: str
    who: str
    microseconds: float
    gigabytes_per_second: float
    copy_microseconds: float
    of_copy: float


def measure(
    shapes: Sequence[tuple[int, int]] = SHAPES,
    cases: Sequence[Case] = CASES,
    peers: Iterable[str] = (),
) -> Iterator[Row]:
    """Time every case on random normal numbers, and those peers that can do the same."""
    timer, peers = Timer(), tuple(peers)
    for rows, columns in shapes:
        for case in cases:
            x = torch.randn(rows, columns, device="cuda", dtype=case.dtype)
            nbytes = case.nbytes(rows, columns)
            for who, call in _calls(case, x, peers):
                before = timer.copy(nbytes)
                took = timer.microseconds(call)
                copy = (before + timer.copy(nbytes)) / 2
                speed = nbytes / took / 1e3
                yield Row(rows, columns, case.name, who, took, speed, copy, copy / took)


def _calls(
    case: Case, x: Tensor, peers: Iterable[str]
) -> Iterator[tuple[str, Callable[[], object]]]:
    fmt = get_format(case.format)
    scale = torch.ones((), device="cuda") if fmt.has_global_scale else None
    yield (
        "blockscale",
        lambda: gpu.quantize(x, fmt, axes=case.axes, layout=case.layout, global_scale=scale),
    )
    same = (case.format, case.layout, case.dtype) == ("mxfp8", "compact", torch.bfloat16)
    if "torchao" in peers and same and case.axes == (-1,) and find_spec("torchao"):
        yield from _torchao(x)


def _torchao(x: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode  # type: ignore[import-untyped]
    from torchao.prototype.mx_formats.kernels import triton_to_mxfp8_dim0  # type: ignore[import-untyped]
    from torchao.prototype.mx_formats.mx_tensor import to_mx  # type: ignore[import-untyped]

    mode = ScaleCalculationMode.RCEIL
    compiled = torch.compile(lambda t: to_mx(t, torch.float8_e4m3fn, 32, scaling_mode=mode))
    yield "torchao, Triton", lambda: triton_to_mxfp8_dim0(x, 32, "rceil")
    yield "torchao, torch.compile", lambda: compiled(x)


def draw(rows: Sequence[Row]) -> Figure:
    """Speed as a part of the copy's: a row of bars for each case, a colour for each shape."""
    shapes = list(dict.fromkeys((row.rows, row.columns) for row in rows))
    names = list(dict.fromkeys(f"{row.case} ({row.who})" for row in rows))
    figure = Figure(figsize=(9, 1 + 0.45 * len(names)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(shapes)
    for i, shape in enumerate(shapes):
        mine = [row for row in rows if (row.rows, row.columns) == shape]
        at = [names.index(f"{row.case} ({row.who})") + (i + 0.5) * height - 0.4 for row in mine]
        axes.barh(at, [row.of_copy for row in mine], height, label=f"{shape[0]} x {shape[1]}")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("speed, as a part of the device's own copy of as many bytes")
    axes.legend()
    return figure
