"""MXFP8 and NVFP4 products on Hopper both ways, beside torch's bf16: weights widened in registers,
or both operands written out in bf16.

    PYTHONPATH=src python3 benchmarks/gpu_exact_paths.py FILE.json [--shapes 24] [--seed 26]

At shapes drawn at random and at those of a layer's three products. Microseconds with a cold L2
cache; ``exact_gemm`` chooses by what this measures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_tiles import COLUMNS, Shape, json_lines, shapes

from blockscale.bench.contest import BASELINE, Call, turns
from blockscale.bench.peers_gemm import bf16
from blockscale.bench.timing import Timer
from blockscale.kernels.common.calls import Operand, multiply
from blockscale.kernels.sm90.dequant_plan import plan_dequant
from blockscale.kernels.sm90.mixed_plan import plan_mixed
from blockscale.quantize import quantize

FORMATS = ("mxfp8", "nvfp4")
ROWS = 256, 32768
WEIGHTS = 4, 64  # of 2^20 elements
LAYERS = ((16384, 7168, 4096), (8192, 8192, 8192))  # rows, outputs, inputs
PATHS: dict[str, Callable[..., Any]] = {"in registers": plan_mixed, "written out": plan_dequant}
REPEATS = 20


def operand(x: torch.Tensor, format: str) -> Operand:
    q = quantize(x, format, backend="kernel")
    return Operand(q.qdata.view(torch.uint8), q.qscale.view(torch.uint8), format)


def calls(shape: Shape, format: str) -> Iterator[tuple[str, Call]]:
    m, n, k = shape
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    a, b = operand(x, format), operand(w, format)
    for name, plan in PATHS.items():
        yield name, partial(multiply, plan, a, b)
    yield BASELINE, bf16(x, w)


def cases(count: int, seed: int) -> Iterator[Shape]:
    for rows, outputs, inputs in LAYERS:
        yield rows, outputs, inputs
        yield rows, inputs, outputs
        yield outputs, inputs, rows
    yield from shapes(seed, count, ROWS, WEIGHTS, COLUMNS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--shapes", type=int, default=24)
    parser.add_argument("--seed", type=int, default=26)
    args = parser.parse_args()
    head = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "seed": args.seed}
    timer, rows = Timer(), list[dict[str, Any]]()
    for shape in cases(args.shapes, args.seed):
        for format in FORMATS:
            us = turns(dict(calls(shape, format)), timer, REPEATS)
            rows.append({"format": format, "shape": shape, "us": us})
            print(f"{format}, {' x '.join(map(str, shape))}: {us}", flush=True)
        args.file.write_text(json_lines({**head, "rows": rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
