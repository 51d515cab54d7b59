"""Show how far the performance model is from an H200, and what it estimates for a B200.

From benchmarks/results/model_h200.json (benchmarks/model_error.py), and from the model itself, it
writes tables of docs/lab/blackwell-model.md and a short one of docs/performance.md. Needs no GPU.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from gpu_quantize import ROOT, head, line, rewrite

from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.sm100.config import choose_config, fit
from blockscale.model import B200, FORMATS, H200, Launch, estimate, launch
from blockscale.model.kernels import tcgen05
from blockscale.model.machine import FITTED

PAGE = ROOT / "docs" / "performance.md"
LAB = ROOT / "docs" / "lab" / "blackwell-model.md"
SHAPES = (
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16384, 16384, 8192),
    (4096, 7168, 2048),
    (16384, 4096, 7168),
    (128, 7168, 16384),
)
#: NVIDIA's data sheet of the HGX B200: operations and bytes a second.
PEAK, MEMORY = {"fp8": 4.5e15, "fp4": 9e15}, 8e12
_FASTER = 1.5  # L2 cache, to see how much of the estimate hangs on it
_COLUMNS = (
    *("ceiling", "estimate", "of it", "wall", "L2 hits", "no supergroups (L2 hits)"),
    *("one CTA", "clusters 4 x 1", f"L2 cache {_FASTER} x as fast"),
)


def h200(result: dict[str, Any]) -> str:
    """Errors of the model, by part of the measurements."""
    lines = head(["launches", "mean error", "median", "estimate too long (+) or short", "worst"])
    for name, row in result["parts"].items():
        numbers = f"{row['mean']:.1%}", f"{row['median']:.1%}", f"{row['bias']:+.1%}"
        worst = f"{row['worst']:.0%}, {row['worst_at'].split()[0]}"
        lines.append(line(name, [str(row["launches"]), *numbers, worst]))
    hits = [
        f"{row['format']} at {' x '.join(map(str, row['shape']))}: ncu {row['ncu']:.1%}, "
        f"model {row['model']:.1%}"
        for row in result["hit_rates"]
    ]
    constants = ", ".join(f"`{name}` {getattr(H200, name):.4g}" for name in FITTED)
    parts = ["\n".join(lines), f"L2 hit rates: {'; '.join(hits)}.", f"Fitted: {constants}."]
    return "\n\n".join(parts)


def b200() -> str:
    """A table for each format."""
    parts = []
    for format in FORMATS["sm_100a"]:
        lines = head(_COLUMNS)
        for shape in SHAPES:
            lines.append(line(" x ".join(map(str, shape)), _cells(format, shape)))
        parts += [f"**{format}**, TFLOP/s", "\n".join(lines)]
    return "\n\n".join(parts)


def b200_short() -> str:
    """The estimates alone: a row a shape, a column a format."""
    lines = head([f"{format}, TFLOP/s" for format in FORMATS["sm_100a"]])
    for shape in SHAPES:
        found = (estimate(launch("sm_100a", each, shape), B200) for each in FORMATS["sm_100a"])
        cells = [f"{each.tflops:.0f}" for each in found]
        lines.append(line(" x ".join(map(str, shape)), cells))
    return "\n".join(lines)


def _cells(format: str, shape: tuple[int, int, int]) -> list[str]:
    chosen = launch("sm_100a", format, shape)
    found, most = estimate(chosen, B200), _ceiling(chosen)
    line_by_line = estimate(replace(chosen, group=1), B200)
    others = (
        estimate(launch("sm_100a", format, shape, ctas=1), B200),
        estimate(_clustered(format, shape), B200),
        estimate(chosen, replace(B200, l2_rate=_FASTER * B200.l2_rate)),
    )
    numbers = f"{most:.0f}", f"{found.tflops:.0f}", f"{found.tflops / most:.0%}"
    hits = f"{found.traffic.hit_rate:.0%}"
    without = f"{line_by_line.tflops:.0f} ({line_by_line.traffic.hit_rate:.0%})"
    return [*numbers, found.wall, hits, without, *(f"{each.tflops:.0f}" for each in others)]


def _clustered(format: str, shape: tuple[int, int, int]) -> Launch:
    """Two pairs of blocks, one below the other, that share tiles of B."""
    names = format.split("_")
    config = choose_config(shape, (names[0], names[-1]), Epilogue())
    return tcgen05(fit(replace(config, ctas=2, cluster=(4, 1), mma_n=256, stages=2)), shape)


def _ceiling(one: Launch) -> float:
    """TFLOP/s if tensor cores or memory, one of the two, never rest."""
    seconds = max(one.flops / PEAK[one.unit], (one.compulsory_bytes + one.output_bytes) / MEMORY)
    return one.flops / seconds / 1e12


def main() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "model_h200.json").read_text())
    tables = (
        ("h200", LAB, h200(result)),
        ("b200", LAB, b200()),
        ("b200 short", PAGE, b200_short()),
    )
    for name, page, text in tables:
        begin = f"<!-- model {name}: made by benchmarks/model_tables.py -->"
        end = f"<!-- model {name}: end -->"
        print(f"{begin}\n\n{text}\n\n{end}\n")
        rewrite(page, text, begin, end)


if __name__ == "__main__":
    main()
