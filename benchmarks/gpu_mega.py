"""A mega MoE on GPUs, beside its steps one after another.

    PYTHONPATH=src python3 benchmarks/gpu_mega.py FILE.json
    PYTHONPATH=src torchrun --nproc-per-node 2 benchmarks/gpu_mega.py FILE.json

At 4096/2048/top-6: 32 experts a rank, what one of 8 holds of 256; and 256 of all ranks, as a share
of the time to read their weights. Microseconds with a cold L2 cache, of tokens that are bfloat16:
their quantization counts; of several ranks those of the slowest. TFLOP/s of both products, of a
rank.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from gpu_tiles import json_lines

import blockscale as bs
from blockscale.bench.timing import Timer
from blockscale.distributed import MegaMoE
from blockscale.kernels.sm90 import fp8_by_weights

HIDDEN, INTERMEDIATE, TOPK = 4096, 2048, 6
TOKENS = (1, 16, 64, 512, 2048, 8192)
ACTIVATIONS = "fp8_1x128"
RANKS, RANK = (int(os.environ.get(key, n)) for key, n in (("WORLD_SIZE", "1"), ("RANK", "0")))


def matrices(experts: int, format: str) -> list[Any]:
    shapes = (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    found = []
    for shape in shapes:
        made = [
            torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 16 for _ in range(experts)
        ]
        found.append(torch.stack([bs.quantize(w, format) for w in made]))
    return found


def times(call: Callable[[], object], timer: Timer) -> float:
    """Of a rank alone the timer's; of several, which begin together, the slowest one's."""
    if RANKS == 1:
        return timer.microseconds(call)
    together = torch.zeros(1, device="cuda")
    took = timer.microseconds(call, ready=partial(dist.all_reduce, together))
    slowest = torch.tensor(took, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def used(ids: torch.Tensor, experts: int) -> int:
    """Experts of this rank that any rank's tokens have."""
    every = [ids]
    if RANKS > 1:
        every = [torch.empty_like(ids) for _ in range(RANKS)]
        dist.all_gather(every, ids)
    return int((torch.cat(every).unique() // experts == RANK).sum())


@torch.no_grad()
def measured(experts: int, format: str, timer: Timer) -> list[dict[str, Any]]:
    """``experts``: of each rank."""
    given, rows = matrices(experts, format), []
    nbytes = sum(w.qdata.nbytes + w.qscale.nbytes for w in given)
    rate = 2 * nbytes / timer.copy(2 * nbytes)  # a copy reads and writes
    how: dict[str, Any] = {"tokens": max(TOKENS), "topk": TOPK, "activations": ACTIVATIONS}
    kernel, steps = (MegaMoE(*given, **how, backend=each) for each in ("kernel", "steps"))
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(tokens, RANKS * experts, device="cuda").argsort(1)[:, :TOPK].contiguous()
        part = torch.rand(tokens, TOPK, device="cuda")
        with patch.object(fp8_by_weights, "_UPCAST_ROWS", 1 << 60):  # sums of products that widen
            assert torch.equal(kernel(x, part, ids), steps(x, part, ids))
        row: dict[str, Any] = {"ranks": RANKS, "experts": experts, "tokens": tokens}
        row |= {"weights": format, "activations": ACTIVATIONS}
        for name, run in (("kernel", kernel), ("steps", steps)):
            row[name] = times(partial(run, x, part, ids), timer)
        flops = 6 * tokens * TOPK * HIDDEN * INTERMEDIATE
        row["tflops"] = flops / (row["kernel"] * 1e6)
        row["weights_share"] = nbytes * used(ids, experts) / experts / rate / row["kernel"]
        rows.append(row)
        if RANK == 0:
            print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--formats", nargs="+", default=["fp8_128x128"])
    parser.add_argument("--experts", nargs="+", type=int, default=[32, 256 // RANKS])
    args = parser.parse_args()
    if RANKS > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.manual_seed(RANK)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "rows": []}
    for experts in args.experts:
        for format in args.formats:
            result["rows"] += measured(experts, format, Timer())
            if RANK == 0:
                args.file.write_text(json_lines(result))
            torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
