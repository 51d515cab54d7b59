"""What a call costs the host: from Python until its launch returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..formats import get_format
from ..kernels import gpu
from ..quantize import quantize, quantize_both
from .timing import host_microseconds

__all__ = ["HostCall", "measure_host"]

_IN_GRAPH = 100


@dataclass(frozen=True, slots=True)
class HostCall:
    """A call, and the median time for which it keeps the host."""

    what: str
    microseconds: float


def measure_host(rows: int = 128, columns: int = 7168) -> Iterator[HostCall]:
    """Time MXFP8 calls with tcgen05 scales of a small bf16 matrix, which the device finishes before
    the host does; beside torch's own smallest call."""
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    mxfp8, both = get_format("mxfp8"), (-1, -2)
    calls: dict[str, Callable[[], object]] = {
        "gpu.quantize, rows": lambda: gpu.quantize(x, mxfp8, layouts=("tcgen05",)),
        "gpu.quantize, both": lambda: gpu.quantize(x, mxfp8, axes=both, layouts=("tcgen05",) * 2),
        "bs.quantize, rows": lambda: quantize(x, layout="tcgen05"),
        "bs.quantize_both": lambda: quantize_both(x, layout="tcgen05"),
        "torch: x.clone()": x.clone,
    }
    for what, call in calls.items():
        for _ in range(3):
            call()
        yield HostCall(what, host_microseconds(call))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_IN_GRAPH):
            quantize(x, layout="tcgen05")
    graph.replay()
    took = host_microseconds(graph.replay, 200, at_once=1)
    yield HostCall(f"bs.quantize, rows, one of {_IN_GRAPH} in a CUDA graph", took / _IN_GRAPH)
