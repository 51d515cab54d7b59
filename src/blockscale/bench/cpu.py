"""Quantizers and products on a CPU beside torch's and torchao's, as a user calls them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..formats import formats
from ..gemm import gemm
from ..quantize import quantize
from .contest import Call, ready
from .quantize import Absent, Row

__all__ = ["SHAPE", "Operation", "measure", "operations", "peers", "products", "rounds"]

SHAPE = 8192, 4096
COPY = "copy into a new tensor"  # as a quantizer's result is one
_AXES = {-1: "rows", -2: "columns"}


@dataclass(frozen=True, slots=True)
class Operation:
    """A call to time, and how many bytes an element of its input counts for."""

    case: str
    who: str
    bytes_per_element: float
    call: Call

    @property
    def name(self) -> str:
        """``who`` and ``case`` in one."""
        library, _, way = self.who.partition(", ")
        name = self.case if library == "torch" else f"{library} {self.case}"
        return f"{name}, {way}" if way else name


def operations(x: Tensor) -> list[Operation]:
    """Ours, and torch's copies, of a bfloat16 tensor."""
    y, scale = torch.empty_like(x), torch.tensor(0.001)
    out = [
        Operation("copy into the same memory each time", "torch", 4, lambda: y.copy_(x)),
        Operation(COPY, "torch", 4, x.clone),
    ]
    for name, axis in (
        ("mxfp8", -1),
        ("mxfp8", -2),
        ("mxfp8_e5m2", -1),
        ("mxfp6_e2m3", -1),
        ("mxfp4", -1),
        ("nvfp4", -1),
        ("nvfp4", -2),
        ("fp8_1x128", -1),
        ("fp8_1x128", -2),
        ("fp8_128x128", -1),
    ):
        given = scale if formats[name].has_global_scale else None
        call = partial(quantize, x, name, axis, pad=True, global_scale=given)
        out.append(_ours(f"{name}, {_AXES[axis]}", name, call))
    out.append(_ours("nvfp4, rows, with its amax", "nvfp4", lambda: quantize(x, "nvfp4", pad=True)))
    for name in ("mxfp8", "nvfp4", "fp8_1x128"):
        q = quantize(x, name, pad=True)
        out.append(_ours(f"dequantize {name}", name, partial(q.dequantize, torch.bfloat16)))
    return out


def _ours(case: str, format: str, call: Call) -> Operation:
    return Operation(case, "blockscale", 2 + formats[format].bits_per_element / 8, call)


def products(x: Tensor, w: Tensor, format: str) -> dict[str, Call]:
    """``x`` (M, K), in bfloat16, by a weight (N, K): ours, the reference, and torch."""
    q = quantize(w, format, pad=True)
    return {
        format: lambda: gemm(x, q.mT),
        f"{format} by {format}": lambda: gemm(quantize(x, format, pad=True), q.mT),
        "reference": lambda: gemm(x, q.mT, backend="reference"),
        "torch, bfloat16": lambda: x @ w.mT,
    }


def peers(x: Tensor) -> list[Operation]:
    """torchao's quantizers. Raises ImportError where it is not installed."""
    mx: Any = import_module("torchao.prototype.mx_formats.mx_tensor")
    nv: Any = import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    mode: Any = import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode.RCEIL
    scale = torch.tensor(0.001)

    def mxfp8(x: Tensor) -> Any:
        return mx.to_mx(x, torch.float8_e4m3fn, 32, mode)

    def nvfp4(x: Tensor) -> Any:
        return nv.nvfp4_quantize(x, 16, scale)

    theirs, ours = mxfp8(x[:64]), quantize(x[:64])
    for a, b in zip(theirs, (ours.scale, ours.qdata), strict=True):
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            raise RuntimeError("torchao's MXFP8 bytes are not ours: it does something else")
    out = []
    for format, function in (("mxfp8", mxfp8), ("nvfp4", nvfp4)):
        size = 2 + formats[format].bits_per_element / 8
        compiled = torch.compile(function, fullgraph=True)
        for way, call in (("torch.compile", compiled), ("eager", function)):
            out.append(Operation(f"{format}, rows", f"torchao, {way}", size, partial(call, x)))
    return out


def rounds(todo: Sequence[Operation], count: int, slow: str = "eager") -> list[list[float]]:
    """Seconds of each, ``count`` times: all of them in every round, so that whatever else the
    machine does hits all alike. Those with ``slow`` in their names run in every fifth."""
    times: list[list[float]] = [[] for _ in todo]
    for each in todo:
        if slow not in each.name:
            each.call()
    for i in range(count):
        for each, mine in zip(todo, times, strict=True):
            if slow in each.name and i % 5:
                continue
            start = time.perf_counter()
            each.call()
            mine.append(time.perf_counter() - start)
    return times


def measure(
    shape: tuple[int, int] = SHAPE, with_peers: bool = False, count: int = 10
) -> Iterator[Row | Absent]:
    """Medians for random normal numbers in bfloat16, on ``torch.get_num_threads()`` threads."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    where, todo = ("CPU", *shape), operations(x)
    if with_peers:
        try:
            others = peers(x)
        except Exception as error:  # whatever a library raises: the table says it
            yield Absent(*where, "mxfp8 and nvfp4, rows", "torchao", f"{error}")
            others = []
        for each in others:
            if isinstance(why := ready(lambda each=each: each.call), str):  # type: ignore[misc]
                yield Absent(*where, each.case, each.who, why)
            else:
                todo.append(each)
    took = [statistics.median(times) for times in rounds(todo, count)]
    copy = next(t for each, t in zip(todo, took, strict=True) if each.case == COPY) / 4
    for each, seconds in zip(todo, took, strict=True):
        nbytes, copied = each.bytes_per_element * x.numel(), copy * each.bytes_per_element
        yield Row(
            *(*where, each.case, each.who),
            *(1e6 * seconds, nbytes / seconds / 1e9, 1e6 * copied, copied / seconds),
        )
