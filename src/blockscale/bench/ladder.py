"""The steps from a first FP8 kernel to the shipped one, beside what others reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ..kernels.common.compile_all import compile_all
from ..kernels.sm90.ladder_steps import STEPS, Step
from ..quantize import quantize
from . import peers_gemm
from .contest import BASELINE, Call, Contest, Row, Where

__all__ = ["GROUP", "PEERS", "STEPS", "contests", "draw"]

GROUP = "Ladder"
PEERS = {
    BASELINE: peers_gemm.bf16,
    "cuBLASLt blockwise": peers_gemm.cublaslt,
    "DeepGEMM": peers_gemm.deep_gemm,
}


def contests(
    sizes: Sequence[int],
    steps: Sequence[Step] = STEPS,
    *,
    multiprocessors: int,
    device: str = "cuda",
) -> Iterator[Contest]:
    """All steps at M = N = K = each size, on random normal numbers quantized beforehand."""
    compile_all(step.config for step in steps)
    for size in sizes:
        x, w = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        contestants = {
            step.name: partial(_prepare, step, x, w, multiprocessors) for step in steps
        } | {who: partial(make, x, w) for who, make in PEERS.items()}
        yield Contest(Where(GROUP, "fp8_block", size, size, size), contestants)


def _prepare(step: Step, x: Tensor, w: Tensor, multiprocessors: int) -> Call:
    a, b = quantize(x, "fp8_1x128", layout="sm90"), quantize(w, "fp8_128x128")
    m, n = x.shape[0], w.shape[0]
    d = torch.empty(m, n, device=x.device, dtype=torch.bfloat16)
    a_scale = step.prepare(a.scale, m)
    data = a.qdata.view(torch.uint8), b.qdata.view(torch.uint8)
    return partial(step.launch, data[0], a_scale, data[1], b.scale, d, multiprocessors)


def draw(rows: Sequence[Row], steps: Sequence[Step] = STEPS) -> Figure:
    """TFLOP/s of each step, a line for each size; those of others are level lines."""
    names = [step.name for step in steps]
    sizes = list(dict.fromkeys(row.m for row in rows))
    figure = Figure(figsize=(9, 1.5 + 0.3 * len(names)), layout="constrained")
    axes = figure.subplots()
    for i, size in enumerate(sizes):
        found = {row.who: row.tflops for row in rows if row.m == size}
        mine = [(found[name], at) for at, name in enumerate(names) if name in found]
        axes.plot(*zip(*mine, strict=True), "o-", color=f"C{i}", label=f"{size}^3")
        for tflops, at in mine:
            axes.annotate(f"{tflops:.0f}", (tflops, at), (4, -9), textcoords="offset points")
        for who, style in zip(PEERS, (":", "--", "-."), strict=True):
            if who in found:
                label = f"{who}, {size}^3: {found[who]:.0f}"
                axes.axvline(found[who], color=f"C{i}", linestyle=style, linewidth=1, label=label)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.08 * max(axes.get_xlim()[1], 1))
    axes.set_xlabel("TFLOP/s")
    figure.legend(loc="outside upper center", ncols=max(len(sizes), 1), fontsize=8)
    return figure
