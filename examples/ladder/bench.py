"""Measures the steps from a first FP8 kernel to the shipped one, beside what others reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from matplotlib.figure import Figure
from torch import Tensor

from blockscale.bench import peers_gemm
from blockscale.bench.contest import BASELINE, Absent, Call, Contest, Row, Where, contest
from blockscale.bench.timing import Timer
from blockscale.cli import bench_output as output
from blockscale.cli.outputs import check_output
from blockscale.cli.sizes import parse_sizes
from blockscale.kernels.common.compile_all import compile_all
from blockscale.quantize import quantize

from .steps import STEPS, Step

__all__ = ["GROUP", "PEERS", "STEPS", "contests", "draw", "main"]

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
        for (tflops, at), side in zip(mine, _sides([tflops for tflops, _ in mine]), strict=True):
            axes.annotate(
                f"{tflops:.0f}",
                (tflops, at),
                (7 * side, 0),
                textcoords="offset points",
                ha="left" if side > 0 else "right",
                va="center",
                color=f"C{i}",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )
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


def _sides(values: Sequence[float]) -> list[int]:
    """Where the label of each point of a line goes, 1: right, -1: left: away from its flatter
    neighbour, whose line would cross it."""
    sides = []
    for i, value in enumerate(values):
        neighbours = [*values[max(i - 1, 0) : i], *values[i + 1 : i + 2]]
        sides.append(-1 if max((n - value for n in neighbours), key=abs, default=0) > 0 else 1)
    return sides


def main(
    sizes: Annotated[str, typer.Option(help="Of M = N = K.")] = "2048,4096",
    json: Annotated[Path | None, typer.Option(help="JSON to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG to draw.")] = None,
) -> None:
    """Measure the steps from a first FP8 kernel to the shipped one, each with one idea more.

    Beside them torch's bf16 product, cuBLASLt and DeepGEMM. What cannot run is listed with the
    reason. Needs a Hopper GPU.
    """
    check_output("json", json)
    check_output("plot", plot, ".png")
    chosen = [size for (size,) in parse_sizes("sizes", sizes, "sizes", "4096")]
    if not torch.cuda.is_available():
        raise ValueError("ladder: needs an NVIDIA GPU; tests/examples runs its kernels without one")
    timer, rows, absent = Timer(), list[Row](), list[Absent]()
    count = torch.cuda.get_device_properties().multi_processor_count
    for one in contests(chosen, multiprocessors=count):
        for found in contest(one, timer):
            if isinstance(found, Row):
                rows.append(found)
            else:
                absent.append(found)
        output.write(json, rows=rows, absent=absent, host=())
    _show(chosen, rows, absent)
    if plot is not None:
        draw(rows).savefig(plot, dpi=150)


def _show(sizes: Sequence[int], rows: Sequence[Row], absent: Sequence[Absent]) -> None:
    found = {(row.who, row.m): f"{row.tflops:.0f}" for row in rows}
    ideas = {step.name: step.idea for step in STEPS} | dict.fromkeys(PEERS, "")
    cells = [
        (name, *(found.get((name, size), "-") for size in sizes), idea)
        for name, idea in ideas.items()
    ]
    columns = ("step", *(f"TFLOP/s, {size}^3" for size in sizes), "idea")
    output.print_table(GROUP, columns, cells, 1)
    output.print_lines(f"{each.who}, {each.shape}, cannot run: {each.why}" for each in absent)
