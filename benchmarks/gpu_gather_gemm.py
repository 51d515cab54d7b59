"""A product of rows that ranks gather: by one kernel, and by steps; beside the gather and the
product by themselves.

    torchrun --nproc-per-node 2 benchmarks/gpu_gather_gemm.py OUT.json
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import blockscale as bs
from blockscale.bench.timing import Timer
from blockscale.distributed import all_gather, all_gather_gemm
from blockscale.distributed.functional_collectives import all_gather_tensor

#: Rows of a rank, K, N.
NAMED = [(2048, 7168, 2048), (2048, 7168, 4096), (4096, 4096, 14336), (8192, 7168, 2048)]
RANDOM = 8


def shapes() -> list[tuple[int, int, int]]:
    chosen = random.Random(0)
    sizes = [(64, 1, 128), (128, 2, 64), (128, 4, 64)]
    drawn = [tuple(u * chosen.randint(a, b) for u, a, b in sizes) for _ in range(RANDOM)]
    return [*NAMED, *drawn]


def measure(shape: tuple[int, int, int], timer: Timer) -> dict[str, Any]:
    rows, k, n = shape
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(ranks * rows, k, device="cuda", generator=generator).bfloat16()
    b: Any = bs.quantize(torch.randn(n, k, device="cuda", generator=generator), "fp8_128x128").mT
    shard = x.chunk(ranks)[rank].contiguous()
    a, compact = (bs.quantize(shard, "fp8_1x128", layout=name) for name in ("sm90", "compact"))
    whole = bs.quantize(x, "fp8_1x128", layout="sm90")
    small = torch.zeros(1, device="cuda")
    calls = {
        "kernel": lambda: all_gather_gemm(a, b, backend="kernel"),
        "steps": lambda: all_gather_gemm(compact, b, backend="steps"),
        "gather": lambda: all_gather(compact),
        "gather bf16": lambda: all_gather_tensor(shard, 0, None),
        "product": lambda: bs.gemm(whole, b),
    }
    want = bs.gemm(whole, b)
    wrong = 0
    for _ in range(20):  # back to back
        got = calls["kernel"]()
        wrong += int((got.float() - want.float()).norm() > 1e-3 * want.float().norm())
    found: dict[str, Any] = {"rows": rows, "k": k, "n": n, "wrong": wrong}
    found["equal"] = bool(torch.equal(got, want))
    for name, call in calls.items():
        us = timer.microseconds(call, ready=lambda: dist.all_reduce(small))
        slowest = torch.tensor(us, device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found[f"{name} us"] = slowest.item()
    found["over the longer"] = found["kernel us"] / max(found["gather us"], found["product us"])
    return found


def main(out: str) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    timer, results = Timer(), []
    for shape in shapes():
        results.append(measure(shape, timer))
        if dist.get_rank() == 0:
            print(results[-1], flush=True)
            name = torch.cuda.get_device_name()
            report = {"device": name, "ranks": dist.get_world_size(), "products": results}
            Path(out).write_text(json.dumps(report) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
