"""MXFP8 and NVFP4 products on Hopper at shapes drawn at random, beside torch's bf16.

    PYTHONPATH=src python3 benchmarks/gpu_exact.py FILE.json [--shapes 6] [--seed 22]

Both operands quantized beforehand, or bf16 by quantized weights; and decoding by weights whose rows
of scales TMA cannot load, beside the next K whose rows it can. Microseconds with a cold L2 cache.
Prints, for each number of rows, the time of bf16 over ours.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean

import torch
from gpu_tiles import COLUMNS, Shape, shapes

from blockscale.bench.contest import BASELINE, Call, ready, turns
from blockscale.bench.gemm import FORMATS
from blockscale.bench.peers_gemm import bf16
from blockscale.bench.timing import Timer
from blockscale.formats import get_format
from blockscale.gemm import gemm

ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048, 8192)
MOST_BF16_ROWS = 128  # with more, bf16 activations are as any
WEIGHTS = 10, 60  # of 2^20 elements
ODD = ((2880, 2880), (4096, 11008), (8192, 5760), (7168, 16384))  # N and K
ODD_ROWS = (1, 16)
SCALE_ROW = 16  # bytes: of rows of scales that TMA loads
REPEATS = 20


@dataclass(frozen=True)
class Measured:
    """Microseconds, or why there are none."""

    group: str
    format: str
    shape: Shape
    ours: float | str
    bf16: float | str


def ours(format: str, quantized: bool, x: torch.Tensor, w: torch.Tensor) -> Call:
    operands = FORMATS[format]
    a, b = operands.quantize(x) if quantized else x, operands.weight(w)
    return lambda: gemm(a, b, backend="kernel")


def aligned(k: int, format: str) -> int:
    """The next K whose rows of scales TMA can load."""
    multiple = SCALE_ROW * get_format(format).block_size
    return -(-k // multiple) * multiple


def cases(count: int, seed: int) -> Iterator[tuple[str, str, bool, Shape]]:
    """The group, the format, whether activations are quantized, and the shape."""
    for format in ("mxfp8", "nvfp4"):
        for m in ROWS:
            for _, n, k in shapes(seed + m, count, (128, 128), WEIGHTS, COLUMNS):
                yield f"both quantized, {m} rows", format, True, (m, n, k)
                if m <= MOST_BF16_ROWS:
                    yield f"bf16 activations, {m} rows", format, False, (m, n, k)
        for m in ODD_ROWS:
            for n, k in ODD:
                yield f"rows of scales, {m} rows", format, False, (m, n, k)
                if aligned(k, format) != k:
                    yield f"the next K, {m} rows", format, False, (m, n, aligned(k, format))


def measure(case: tuple[str, str, bool, Shape], timer: Timer) -> Measured:
    group, format, quantized, (m, n, k) = case
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    makers = {"ours": partial(ours, format, quantized, x, w), BASELINE: partial(bf16, x, w)}
    made = {name: ready(make) for name, make in makers.items()}
    calls = {name: call for name, call in made.items() if not isinstance(call, str)}
    took = {**made, **turns(calls, timer, REPEATS)}
    times = (took[name] for name in makers)
    found = (round(time, 2) if isinstance(time, float) else str(time) for time in times)
    return Measured(group, format, (m, n, k), *found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--shapes", type=int, default=6)
    parser.add_argument("--seed", type=int, default=22)
    args = parser.parse_args()
    timer = Timer()
    rows = [measure(case, timer) for case in cases(args.shapes, args.seed)]
    head = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "seed": args.seed}
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    text = json.dumps(head)[:-1] + f', "rows": [\n{lines}\n]}}\n'
    args.file.write_text(text, encoding="utf-8")
    for key in dict.fromkeys((row.group, row.format) for row in rows):
        here = [row for row in rows if (row.group, row.format) == key]
        for row in here:
            if isinstance(row.ours, str) or isinstance(row.bf16, str):
                print(f"{row.shape}, {row.format}: {row.ours}; {row.bf16}")
        ratios = [r.bf16 / r.ours for r in here if isinstance(r.ours, float)]  # type: ignore[operator]
        if ratios:
            print(f"{', '.join(key)}: {geometric_mean(ratios):.3f}, least {min(ratios):.3f}")


if __name__ == "__main__":
    main()
