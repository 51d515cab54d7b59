"""Products whose weights are widened in registers, on Hopper, at shapes drawn at random: the chosen
kernel, and all that differ from it in rows of A in a tile and in how K is split.

    PYTHONPATH=src python3 benchmarks/gpu_mixed_tiles.py FILE.json [--shapes 4] [--seed 23]

Microseconds with a cold L2 cache, with the kernel that puts A in order, and torch's of bf16. Every
kernel's result is compared with the chosen one's first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from gpu_tiles import COLUMNS, Shape, json_lines, shapes
from torch import Tensor

import blockscale as bs
from blockscale.bench.contest import BASELINE, Call, turns
from blockscale.bench.peers_gemm import bf16
from blockscale.bench.timing import Timer
from blockscale.kernels.common.compile_all import compile_all
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.gpu import CLUSTERS, GPUS, Gpu
from blockscale.kernels.common.loadable import rows_to_load
from blockscale.kernels.common.runtime import gpu_of
from blockscale.kernels.sm90.mixed_config import B_ROWS, BF16, Config, choose_config
from blockscale.kernels.sm90.permute_config import PermuteConfig

FORMATS = ("mxfp8", "nvfp4")
ROWS = (24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
TILE_ROWS = (8, 16, 32, 64, 128, 192, 256)
WEIGHTS = 2, 64  # of 2^20 elements
MANY_ROWS = 128  # tiles of as many, or of more, are tried with any number of rows
ROWS_OF_A_BOX = 64  # that TMA stores
EPILOGUE = Epilogue(tma_store=True)
REPEATS = 15
DIFFERS = 0.02  # of the largest value: sums in another order differ less


def name(config: Config) -> str:
    split = "stream" if config.stream_k else f"{config.split_k} x {config.warpgroup_split_k}"
    return f"{config.rows} rows, {split}, {config.stages} stages"


def most_stages(config: Config, **fields: Any) -> Config | None:
    """The kernel made so, with as many stages as there is room for, three at least."""
    for stages in range(12, 2, -1):
        try:
            return replace(config, stages=stages, **fields)
        except ValueError:
            continue
    return None


def candidates(shape: Shape, format: str, gpu: Gpu) -> dict[str, Config]:
    """The chosen one first."""
    (m, n, _), chosen = shape, choose_config(shape, format, EPILOGUE, gpu=gpu)
    found = {name(chosen): chosen}
    for rows in TILE_ROWS:
        if rows > 2 * m or rows < min(m / 4, MANY_ROWS):
            continue
        made = replace(
            chosen,
            rows=rows,
            split_k=1,
            warpgroup_split_k=1,
            stream_k=False,
            stages=4,
            tma_store=rows >= ROWS_OF_A_BOX,
            loaded_rows=rows_to_load(m, rows) if m < rows and rows >= ROWS_OF_A_BOX else 0,
        )
        tiles = -(-m // rows) * -(-n // B_ROWS)
        ways = [
            {"split_k": split, "warpgroup_split_k": parts}
            for split in CLUSTERS
            for parts in (1, 2)
            if split == 1 or tiles <= gpu.max_active_clusters(split)
        ]
        for way in [*ways, {"stream_k": True}]:
            config = most_stages(made, **way)
            if config:
                found.setdefault(name(config), config)
    return found


def product(
    config: Config, gpu: Gpu, x: Tensor, weight: tuple[Tensor, Tensor]
) -> tuple[Call, Tensor]:
    """A call, and what it writes."""
    a, d = torch.empty_like(x), x.new_full((len(x), len(weight[0])), torch.nan)
    words = config.partials(gpu.multiprocessors)
    partials = torch.empty(words, dtype=torch.int32, device=x.device) if words else None
    widen, run = gpu.load(widens(config)), gpu.load(config)

    def call() -> None:
        widen(x, None, a, partials)
        run(a, None, partials, *weight, d, None, None, None, None, gpu.multiprocessors)

    return call, d


def widens(config: Config) -> PermuteConfig:
    return PermuteConfig(BF16, config.block_k, clears=config.stream_k)


def calls(shape: Shape, format: str, gpu: Gpu) -> Iterator[tuple[str, Call]]:
    m, n, k = shape
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    q = bs.quantize(w, format, backend="kernel")
    weight, want = (q.qdata.view(torch.uint8), q.qscale.view(torch.uint8)), None
    for label, config in candidates(shape, format, gpu).items():
        call, d = product(config, gpu, x, weight)
        call()
        want = d if want is None else want
        if not float((d - want).abs().max()) <= DIFFERS * float(want.abs().max()):
            raise SystemExit(f"{shape}, {format}, {label}: other values")
        yield label, call
    yield BASELINE, bf16(x, w)


def cases(count: int, seed: int) -> Iterator[tuple[Shape, str]]:
    for m in ROWS:
        for _, n, k in shapes(seed + m, count, (128, 128), WEIGHTS, COLUMNS):
            for format in FORMATS:
                yield (m, n, k), format


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--shapes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=23)
    args = parser.parse_args()
    gpu = gpu_of(torch.device("cuda")) or GPUS["sm_90a"]
    where = list(cases(args.shapes, args.seed))
    configs = [config for case in where for config in candidates(*case, gpu).values()]
    compile_all([*configs, *map(widens, configs)])
    timer, rows, ratios = Timer(), [], []
    for (m, n, k), format in where:
        us: dict[str, float] = {}
        for label, took in turns(dict(calls((m, n, k), format, gpu)), timer, REPEATS).items():
            if isinstance(took, str):
                raise SystemExit(f"{m} x {n} x {k}, {format}, {label}: {took}")
            us[label] = round(took, 2)
        chosen, *others, _ = us
        best = min((chosen, *others), key=us.__getitem__)
        ratios.append(us[best] / us[chosen])
        rows.append({"m": m, "n": n, "k": k, "format": format, "chosen": chosen, "us": us})
        of_bf16 = us[BASELINE] / us[chosen]
        print(
            f"{m} x {n} x {k}, {format}: {chosen} {us[chosen]:.1f} us, {of_bf16:.3f} of bf16; "
            f"{ratios[-1]:.3f} of {best}"
        )
    print(f"the mean of {len(ratios)}: {geometric_mean(ratios):.4f}, the least {min(ratios):.3f}")
    head = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "seed": args.seed}
    args.file.write_text(json_lines({**head, "products": rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
