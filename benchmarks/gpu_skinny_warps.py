"""Decoding products on Hopper, at named shapes and some drawn at random: the chosen kernel, and
those that differ from it in warps of a CTA and their stages.

    PYTHONPATH=src python3 benchmarks/gpu_skinny_warps.py FILE.json [--shapes 16] [--seed 7]

Microseconds of a product in a CUDA graph of many, each of another weight, so many bytes that the L2
cache has none of them: one right after the other, and with a pause between them, which is taken
off. Every kernel's result is compared with the chosen one's first.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean

import torch
from gpu_mixed_tiles import DIFFERS
from gpu_tiles import json_lines
from torch import Tensor

from blockscale.bench.contest import Call, turns
from blockscale.bench.timing import Timer
from blockscale.formats import get_format
from blockscale.kernels.common.compile_all import compile_all
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.gpu import GPUS, Gpu
from blockscale.kernels.common.runtime import gpu_of
from blockscale.kernels.sm90.skinny_config import SCALE_ROW, Config, choose_config

Case = tuple[int, int, str, int]  # N, K, the format of B, M

NAMED = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)  # a Llama's, of 8 billion
PRODUCTS = ("nvfp4", 1), ("nvfp4", 16), ("mxfp8", 1), ("mxfp8", 16), ("mxfp4", 1)
COLUMNS, DEPTH = (10.5, 15), (10.5, 14.3)  # logarithms to base 2 of N and K
WARPS = {2: (4, 6, 8, 12, 16), 3: (4, 8, 12)}  # by stages
PAUSES = 0, 3  # microseconds
CLOCK = 1980  # cycles a microsecond
COLD = 180 << 20  # bytes of all weights of a graph
LEAST = 4  # weights
CODES, SCALES = (0, 120), (100, 126)  # bytes drawn for them
REPEATS = 5


def name(config: Config) -> str:
    return f"{config.warps} x {config.stages}"


def candidates(case: Case, gpu: Gpu) -> dict[str, Config]:
    """The chosen one first."""
    n, k, b_format, m = case
    format = get_format(b_format)
    chosen = choose_config(
        m,
        n,
        k,
        b_format,
        Epilogue(alpha=(0,) if format.has_global_scale else ()),
        tma_scales=k // format.block_size % SCALE_ROW == 0,  # these lie without gaps
        gpu=gpu,
    )
    found = {name(chosen): chosen}
    for stages, counts in WARPS.items():
        for warps in counts:
            try:
                config = replace(chosen, warps=warps, stages=stages)
            except ValueError:  # no room
                continue
            found.setdefault(name(config), config)
    return found


def weights(case: Case) -> Iterator[tuple[Tensor, Tensor]]:
    """Codes and scales, all of them finite."""
    n, k, b_format, _ = case
    format = get_format(b_format)
    row_bytes, row_scales = k * format.element.bits // 8, k // format.block_size
    count = max(LEAST, -(-COLD // (n * (row_bytes + row_scales))))
    draw = partial(torch.randint, dtype=torch.uint8, device="cuda")
    codes, scales = draw(*CODES, (count, n, row_bytes)), draw(*SCALES, (count, n, row_scales))
    return zip(codes, scales, strict=True)


def graph(steps: list[Call]) -> torch.cuda.CUDAGraph:
    for step in steps:  # what is loaded at the first call cannot be captured
        step()
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        for step in steps:
            step()
    return made


def products(case: Case, gpu: Gpu) -> dict[str, list[Call]]:
    """Of each candidate, a call for each of the weights."""
    n, k, _, m = case
    a, each = torch.randn(m, k, device="cuda").bfloat16(), list(weights(case))
    want, found = None, {}
    for label, config in candidates(case, gpu).items():
        run, d = gpu.load(config), a.new_full((m, n), torch.nan)
        alpha = torch.ones((), device="cuda") if config.alpha else None
        found[label] = [
            partial(run, a, None, *weight, d, None, alpha, gpu.multiprocessors) for weight in each
        ]
        found[label][0]()
        want = d.clone() if want is None else want
        if not float((d - want).abs().max()) <= DIFFERS * float(want.abs().max()):
            raise SystemExit(f"{case}, {label}: other values")
    return found


def measured(case: Case, gpu: Gpu, timer: Timer) -> dict[str, list[float]]:
    """Microseconds of each candidate, for each of the pauses."""
    calls, us = products(case, gpu), defaultdict(list)
    for pause in PAUSES:
        rest = [partial(torch.cuda._sleep, pause * CLOCK)] if pause else []
        graphs = {
            label: graph([each for step in steps for each in (step, *rest)])
            for label, steps in calls.items()
        }
        replays: dict[str, Call] = {label: each.replay for label, each in graphs.items()}
        for label, took in turns(replays, timer, REPEATS).items():
            if isinstance(took, str):
                raise SystemExit(f"{case}, {label}: {took}")
            us[label].append(round(took / len(calls[label]) - pause, 2))
    return dict(us)


def shapes(count: int, seed: int) -> Iterator[tuple[int, int]]:
    """N and K with equally likely logarithms; TMA cannot load rows of scales of some K."""
    rng = random.Random(seed)
    for _ in range(count):
        n, k = (2 ** rng.uniform(*span) for span in (COLUMNS, DEPTH))
        yield round(n / 64) * 64, round(k / 256) * 256


def cases(count: int, seed: int) -> Iterator[Case]:
    for (n, k), (format, m) in product((*NAMED, *shapes(count, seed)), PRODUCTS):
        yield n, k, format, m


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--shapes", type=int, default=16)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    gpu = gpu_of(torch.device("cuda")) or GPUS["sm_90a"]
    where = list(cases(args.shapes, args.seed))
    compile_all(config for case in where for config in candidates(case, gpu).values())
    timer, rows, ratios = Timer(), [], []
    for n, k, format, m in where:
        us = measured((n, k, format, m), gpu, timer)
        chosen, best = next(iter(us)), min(us, key=lambda label: sum(us[label]))
        ratios.append(sum(us[chosen]) / sum(us[best]))
        rows.append({"n": n, "k": k, "format": format, "m": m, "chosen": chosen, "us": us})
        print(
            f"{m} x {n} x {k}, {format}: {chosen} {us[chosen]} us, {ratios[-1]:.3f} of {best}",
            flush=True,
        )
    print(f"the mean of {len(ratios)}: {geometric_mean(ratios):.4f}, the most {max(ratios):.3f}")
    head = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "seed": args.seed}
    args.file.write_text(json_lines({**head, "products": rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
