"""What a call costs the host: from Python until its launch returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from ..gemm import gemm
from ..kernels.quantizers import calls as quantizers
from ..ops.operand_layout import operand_layout
from ..quantize import quantize, quantize_both
from ..tensor import ScaledTensor
from .contest import Call, ready
from .timing import host_microseconds

__all__ = ["HostCall", "gemm_calls", "measure_host", "quantize_calls"]

_IN_GRAPH = 100
_FRESH = 2500  # more operands than calls that are timed: of one seen before, more is known

Calls = dict[str, Call]


@dataclass(frozen=True, slots=True)
class HostCall:
    """A call, and the median time for which it keeps the host; without one, why it cannot run."""

    what: str
    microseconds: float | None
    why: str = ""


def quantize_calls(rows: int = 128, columns: int = 7168) -> Calls:
    """MXFP8 calls with tcgen05 scales of a small bf16 matrix, which the device finishes before the
    host does; beside torch's own smallest call."""
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    along, both = (
        quantizers.Request("mxfp8", axes, ("tcgen05",) * len(axes)) for axes in ((-1,), (-1, -2))
    )
    return {
        "quantizers.calls.quantize, rows": lambda: quantizers.quantize(x, along),
        "quantizers.calls.quantize, both": lambda: quantizers.quantize(x, both),
        "bs.quantize, rows": lambda: quantize(x, layout="tcgen05"),
        "bs.quantize_both": lambda: quantize_both(x, layout="tcgen05"),
        "torch: x.clone()": x.clone,
    }


def gemm_calls(m: int = 128, n: int = 256, k: int = 512, device: str = "cuda") -> Calls:
    """Products of small matrices, beside torch's own in bf16."""
    x, w = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
    a, weight = quantize(x, "fp8_1x128", layout="sm90"), quantize(w, "fp8_128x128")
    b, fresh = weight.mT, cycle([a.detach() for _ in range(_FRESH)])
    mx, many, mx_weight = (_as_read(each, "mxfp8") for each in (x, x.repeat(2, 1), w))
    nv, nv_weight = (_as_read(each, "nvfp4") for each in (x, w))
    mx_weight, nv_weight = mx_weight.mT, nv_weight.mT
    out = torch.zeros(m, n, device=device)
    return {
        "bs.gemm, fp8_block": lambda: gemm(a, b, backend="kernel"),
        "bs.gemm, fp8_block, each a new, w.mT in the call": lambda: gemm(
            next(fresh), weight.mT, backend="kernel"
        ),
        "bs.gemm, fp8_block, out=, accumulate": lambda: gemm(
            a, b, out=out, accumulate=True, backend="kernel"
        ),
        "bs.gemm, mxfp8": lambda: gemm(mx, mx_weight, backend="kernel"),
        "bs.gemm, bf16 by mxfp8": lambda: gemm(x, mx_weight, backend="kernel"),
        "bs.gemm, nvfp4": lambda: gemm(nv, nv_weight, backend="kernel"),
        f"bs.gemm, mxfp8, {2 * m} rows": lambda: gemm(many, mx_weight, backend="kernel"),
        "torch: x @ w.mT": lambda: x @ w.mT,
    }


def _as_read(x: Tensor, format: str) -> ScaledTensor:
    """With scales as kernels read them."""
    return quantize(x, format, layout=operand_layout(format, x.device).layout)


def measure_host(calls: Calls, in_graph: str, at_once: int = 100) -> Iterator[HostCall]:
    """Time the calls, ``at_once`` of which a stream takes without making the host wait, and that
    named ``in_graph`` as one of many in a CUDA graph."""
    found = {what: _first(call) for what, call in calls.items()}
    for what, call in found.items():
        if isinstance(call, str):
            yield HostCall(what, None, call)
            continue
        call()
        yield HostCall(what, host_microseconds(call, at_once=at_once))
    if isinstance(found[in_graph], str):
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_IN_GRAPH):
            calls[in_graph]()
    graph.replay()
    took = host_microseconds(graph.replay, 200, at_once=1)
    yield HostCall(f"{in_graph}, one of {_IN_GRAPH} in a CUDA graph", took / _IN_GRAPH)


def _first(call: Call) -> Call | str:
    return ready(lambda: call)
