"""A mega MoE on a GPU, of one rank, beside its steps one after another.

    PYTHONPATH=src python3 benchmarks/gpu_mega.py FILE.json

At 4096/2048/top-6: 32 experts, what a rank of 8 holds of 256; and all 256, as a share of the time
to read their weights. Microseconds with a cold L2 cache, of tokens that are bfloat16: their
quantization counts. TFLOP/s of both products.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_tiles import json_lines

import blockscale as bs
from blockscale.bench.timing import Timer
from blockscale.distributed import MegaMoE

HIDDEN, INTERMEDIATE, TOPK = 4096, 2048, 6
TOKENS = (16, 64, 512, 2048, 8192)
EXPERTS = (32, 256)


def matrices(experts: int, format: str) -> list[Any]:
    shapes = (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    found = []
    for shape in shapes:
        made = [
            torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 16 for _ in range(experts)
        ]
        found.append(torch.stack([bs.quantize(w, format) for w in made]))
    return found


@torch.no_grad()
def measured(experts: int, format: str, timer: Timer) -> list[dict[str, Any]]:
    given, rows = matrices(experts, format), []
    nbytes = sum(w.qdata.nbytes + w.qscale.nbytes for w in given)
    how = {"tokens": max(TOKENS), "topk": TOPK}
    kernel, steps = (MegaMoE(*given, **how, backend=each) for each in ("kernel", "steps"))
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(tokens, experts, device="cuda").argsort(1)[:, :TOPK].contiguous()
        part = torch.rand(tokens, TOPK, device="cuda")
        assert torch.equal(kernel(x, part, ids), steps(x, part, ids))
        row: dict[str, Any] = {"experts": experts, "format": format, "tokens": tokens}
        for name, run in (("kernel", kernel), ("steps", steps)):
            row[name] = timer.microseconds(partial(run, x, part, ids))
        flops = 6 * tokens * TOPK * HIDDEN * INTERMEDIATE
        row["tflops"] = flops / (row["kernel"] * 1e6)
        row["weights_share"] = nbytes / 4.26e12 * 1e6 / row["kernel"]
        print(row, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--format", default="fp8_128x128")
    args = parser.parse_args()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "rows": []}
    for experts in EXPERTS:
        result["rows"] += measured(experts, args.format, Timer())
        args.file.write_text(json_lines(result))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
