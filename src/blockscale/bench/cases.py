"""What ``bench quantize`` measures, as data: ways to quantize, and back."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..formats import Format, get_format
from ..kernels.quantizers import calls as quantizers
from ..layouts import get_layout

__all__ = ["GROUPS", "SHAPES", "Case", "Group", "expert_ends", "prepare"]

SHAPES = ((16384, 16384), (16384, 7168), (32768, 2048))
_EXPERTS = ((32768, 7168), (32768, 2048))
_SMALL = ((128, 7168), (1, 7168))

_BOTH = (-1, -2)
_ALONG = {(-1,): "rows", (-2,): "columns", _BOTH: "both"}
# producer -> its name, and elements read for each one of its result
_PRODUCERS = {
    "load": ("", 1.0),
    "swiglu": ("SwiGLU, ", 2.0),
    "swiglu_backward": ("SwiGLU backward, ", 1.5),
    "rmsnorm": ("RMSNorm, ", 1.0),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A way to quantize, or ``back`` from data and scales to values of ``dtype``."""

    format: str
    axes: tuple[int, ...]
    layout: str
    dtype: torch.dtype = torch.bfloat16
    producer: str = "load"
    experts: int = 0  # groups of rows, see ``expert_ends``
    amax: bool = False  # finds the global scale by a read of its own; otherwise it is given
    k_major: bool = False  # columns of 8 bits are stored column by column
    back: bool = False

    @property
    def name(self) -> str:
        name = "dequantize " * self.back + _PRODUCERS[self.producer][0]
        name += f"{self.format} {_ALONG[self.axes]}"
        name += ", with its amax" * self.amax
        name += f", {self.experts} experts" * bool(self.experts)
        name += ", K-major" * self.k_major
        return f"{name}, {self.layout}, {str(self.dtype).removeprefix('torch.')}"

    def nbytes(self, rows: int, columns: int) -> float:
        """The fewest bytes that must move for a result of that shape: each input once (twice with
        the amax), data and scales for each axis; the same on the way back. Padding of scales does
        not count."""
        fmt = get_format(self.format)
        each = fmt.element.bits / 8 + fmt.scale.nbytes / (fmt.block[0] * fmt.block[1])
        read = _PRODUCERS[self.producer][1] * self.dtype.itemsize * (1 + self.amax)
        nbytes = rows * columns * (read + len(self.axes) * each)
        if self.producer == "rmsnorm":  # the weight, and what the backward needs
            nbytes += columns * self.dtype.itemsize + rows * 4
        return nbytes


@dataclass(frozen=True, slots=True)
class Group:
    """Cases shown in one table."""

    name: str
    cases: tuple[Case, ...]
    shapes: tuple[tuple[int, int], ...] = SHAPES  # of the results
    copy_kernel: bool = False  # compared with a copy by a kernel, see ``Timer.copy``


GROUPS = (
    Group(
        "MXFP8",
        (
            Case("mxfp8", (-1,), "tcgen05"),
            Case("mxfp8", (-1,), "compact"),
            Case("mxfp8", (-2,), "tcgen05"),
            Case("mxfp8", (-2,), "compact"),
            Case("mxfp8", _BOTH, "tcgen05"),
            Case("mxfp8", _BOTH, "compact"),
            Case("mxfp8", (-1,), "tcgen05", torch.float32),
        ),
    ),
    Group(
        "4 bits",
        (
            Case("mxfp4", (-1,), "tcgen05"),
            Case("mxfp4", (-2,), "tcgen05"),
            Case("mxfp4", _BOTH, "tcgen05"),
            Case("nvfp4", (-1,), "tcgen05"),
            Case("nvfp4", (-2,), "tcgen05"),
            Case("nvfp4", _BOTH, "tcgen05"),
            Case("nvfp4", (-1,), "tcgen05", amax=True),
            Case("nvfp4", _BOTH, "tcgen05", amax=True),
        ),
    ),
    Group(
        "FP8 with scales of 128",
        (
            Case("fp8_1x128", (-1,), "sm90"),
            Case("fp8_1x128", (-2,), "sm90"),
            Case("fp8_1x128", _BOTH, "sm90"),
            Case("fp8_128x128", (-1,), "compact"),
        ),
    ),
    Group(
        "Columns stored K-major",
        (
            Case("fp8_1x128", (-2,), "sm90", k_major=True),
            Case("fp8_1x128", _BOTH, "sm90", k_major=True),
            Case("fp8_128x128", _BOTH, "compact"),
            Case("fp8_128x128", _BOTH, "compact", k_major=True),
            Case("mxfp8", (-2,), "packed", k_major=True),
            Case("mxfp8", _BOTH, "packed", k_major=True),
            Case("mxfp8", _BOTH, "packed", producer="swiglu", k_major=True),
        ),
    ),
    Group(
        "Experts of skewed sizes, beside none",
        tuple(Case("mxfp8", (-1,), "tcgen05", experts=n) for n in (0, 8, 32)),
        _EXPERTS,
    ),
    Group(
        "Fused producers",
        (
            Case("mxfp8", _BOTH, "tcgen05", producer="swiglu"),
            Case("mxfp8", _BOTH, "tcgen05", producer="swiglu_backward"),
            Case("mxfp8", (-1,), "tcgen05", producer="rmsnorm"),
        ),
    ),
    Group(
        "Dequantized",
        (
            Case("mxfp8", (-1,), "compact", back=True),
            Case("mxfp8", (-2,), "compact", back=True),
            Case("mxfp8", (-2,), "compact", k_major=True, back=True),
            Case("mxfp4", (-1,), "compact", back=True),
            Case("nvfp4", (-1,), "compact", back=True),
            Case("nvfp4", (-2,), "compact", back=True),
            Case("fp8_1x128", (-1,), "sm90", back=True),
            Case("fp8_128x128", (-1,), "compact", back=True),
            Case("mxfp8", (-1,), "compact", torch.float32, back=True),
        ),
    ),
    Group(
        "Small inputs, beside a copy by a kernel",
        (
            Case("mxfp8", (-1,), "tcgen05"),
            Case("mxfp8", (-1,), "compact"),
            Case("mxfp8", _BOTH, "tcgen05"),
            Case("nvfp4", (-1,), "tcgen05"),
            Case("fp8_1x128", (-1,), "sm90"),
        ),
        _SMALL,
        copy_kernel=True,
    ),
)


def expert_ends(rows: int, experts: int) -> list[int]:
    """Where each expert's rows end: sizes as 1, 1/2, 1/3, ..., in a shuffled order that is always
    the same, rounded to rows (so not to multiples of 128)."""
    weights = [1 / (i + 1) for i in range(experts)]
    random.Random(0).shuffle(weights)
    total = sum(weights)
    return [round(rows * part / total) for part in accumulate(weights)]


def prepare(case: Case, rows: int, columns: int, device: str = "cuda") -> Callable[[], object]:
    """The call that does ``case`` for a result of that shape, its inputs random normal numbers.

    The call raises ValueError where there is no kernel for it.
    """
    fmt = get_format(case.format)

    if case.back:
        return _prepare_back(case, fmt, (rows, columns), device)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=case.dtype)

    if case.producer == "rmsnorm":
        x, weight = randn(rows, columns), randn(columns)
        norm = quantizers.Request(fmt.name, layouts=(case.layout,))
        return lambda: quantizers.rmsnorm(x, weight, norm, eps=1e-6)
    others = (randn(rows, columns // 2),) if case.producer == "swiglu_backward" else ()
    x = randn(rows, 2 * columns if case.producer == "swiglu" else columns)
    scale = torch.ones((), device=device) if fmt.has_global_scale else None
    offsets = None
    if case.experts:
        offsets = torch.tensor(expert_ends(rows, case.experts), dtype=torch.int32, device=device)

    asked = quantizers.Request(
        fmt.name,
        case.axes,
        (case.layout,) * len(case.axes),
        producer=case.producer,
        grouped=offsets is not None,
        k_major=case.k_major,
    )

    def call() -> object:
        found = scale
        if case.amax:
            found = quantizers.global_scale(x, fmt, producer=case.producer, others=others)
        return quantizers.quantize(x, asked, global_scale=found, offsets=offsets, others=others)

    return call


def _prepare_back(
    case: Case, fmt: Format, shape: tuple[int, int], device: str
) -> Callable[[], object]:
    """Data and scales are random bytes: the kernel takes as long for all."""
    (axis,) = case.axes
    stored = fmt.data_shape(shape, axis)
    turned = fmt.turned(axis, case.k_major)
    lines = stored[::-1] if turned else stored
    data = torch.randint(0, 256, lines, dtype=torch.uint8, device=device)
    scales = fmt.scale_shape(shape, axis)
    if case.layout != "compact":
        outers, blocks = scales if axis == -1 else scales[::-1]
        scales = get_layout(case.layout).stored_shape((outers, blocks))
    kind = torch.uint8 if fmt.scale.nbytes == 1 else torch.float32
    scale = torch.randint(0, 127, scales, device=device).to(kind)
    factor = torch.ones((), device=device) if fmt.has_global_scale else None
    return lambda: quantizers.dequantize(
        data.mT if turned else data,
        scale,
        quantizers.Stored(fmt.name, shape, axis, case.layout),
        global_scale=factor,
        dtype=case.dtype,
    )
