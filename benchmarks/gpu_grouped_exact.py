"""Grouped products by MXFP8, NVFP4 and MXFP4 weights on Hopper beside torch's in bf16: 32,768 rows,
and a few rows of each group, masked, as decoding has them.

    PYTHONPATH=src python3 benchmarks/gpu_grouped_exact.py FILE.json [--rounds 4]

Microseconds with a cold L2 cache. ``bytes`` is what a product's weights take at 3.8 TB/s.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_grouped import in_any_order
from gpu_tiles import json_lines

import blockscale as bs
from blockscale.bench.contest import Call
from blockscale.bench.timing import Timer

BF16 = torch.bfloat16
Quantized = dict[str, bs.ScaledTensor]
ROWS, FORMATS = 32768, ("mxfp8", "nvfp4", "mxfp4")
WEIGHTS = (4096, 7168), (7168, 2048)  # N, K
DECODED = 1, 4, 16, 64  # rows of a group
_RATE = 3.8e6  # bytes a microsecond


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def ends_of(groups: int, rows: int) -> torch.Tensor:
    """Ends of groups of so many rows."""
    return torch.arange(1, groups + 1, device="cuda", dtype=torch.int32) * rows


def many(x: torch.Tensor, w: torch.Tensor, quantized: Quantized) -> Iterator[tuple[str, Call]]:
    ends = ends_of(len(w), ROWS // len(w))
    yield "torch bf16", partial(torch._grouped_mm, x, w.mT, ends)
    for format, q in quantized.items():
        a, b = bs.quantize(x, format), q.mT
        grouped = partial(bs.grouped_gemm, offsets=ends, backend="kernel")
        yield format, partial(grouped, a, b)
        yield f"bf16 x {format}", partial(grouped, x, b)
        yield f"one product, {format}", partial(bs.gemm, a, b[0], backend="kernel")


def few(x: torch.Tensor, w: torch.Tensor, quantized: Quantized) -> Iterator[tuple[str, Call]]:
    groups, rows, _ = x.shape
    ends = ends_of(groups, rows)
    counts = torch.full_like(ends, rows)
    yield "torch bf16", partial(torch._grouped_mm, x.flatten(0, 1), w.mT, ends)
    yield "torch bf16, bmm", partial(torch.bmm, x, w.mT)
    for format, q in quantized.items():
        product = partial(bs.grouped_gemm, x, q.mT, counts=counts, backend="kernel")
        yield f"bf16 x {format}", product


def floors(w: torch.Tensor, quantized: Quantized) -> dict[str, float]:
    """Microseconds that the bytes of the weights take."""
    found = {"bf16": w.nbytes}
    found |= {format: q.qdata.nbytes + q.qscale.nbytes for format, q in quantized.items()}
    return {name: round(each / _RATE, 1) for name, each in found.items()}


def check(calls: dict[str, Call]) -> None:
    """Each quantized product is near the one in bf16, as near as its format is."""
    want = calls["torch bf16"]().float().flatten(0, -2)
    for name, call in calls.items():
        if "product" not in name:
            error = (call().float().flatten(0, -2) - want).norm() / want.norm()
            assert error < (0.05 if "mxfp8" in name else 0.3), (name, float(error))


def measured(timer: Timer, rounds: int) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    for groups in (8, 32):
        for n, k in WEIGHTS:
            w = normal(groups, n, k) / 8
            quantized = {format: bs.quantize(w, format) for format in FORMATS}
            weights = w, quantized
            given = {ROWS: dict(many(normal(ROWS, k), *weights))}
            given |= {groups * m: dict(few(normal(groups, m, k), *weights)) for m in DECODED}
            for m, calls in given.items():
                check(calls)
                took = in_any_order(calls, timer, rounds, random.Random(repr((groups, m, n, k))))
                rounded = {name: round(each, 1) for name, each in took.items()}
                shape = groups, m, n, k
                yield {"shape": shape, "microseconds": rounded, "bytes": floors(*weights)}
            del given, calls, weights, quantized


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    rows = []
    for row in measured(Timer(), args.rounds):
        rows.append(row)
        print(row["shape"], row["microseconds"], flush=True)
    device = torch.cuda.get_device_name()
    result = {"device": device, "rounds": args.rounds, "products": rows}
    args.file.write_text(json_lines(result))


if __name__ == "__main__":
    main()
