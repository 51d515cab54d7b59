"""Tiles of the FP8 product on Hopper, 1x128 by 128x128, at shapes drawn at random: the chosen one,
and a grid of tiles and clusters that the chooser does not know yet, beside DeepGEMM and bf16.

    PYTHONPATH=src python3 benchmarks/gpu_tiles.py FILE.json [--shapes 40] [--seed 22]
        [--rows 65 1024] [--peers DeepGEMM bf16]

Microseconds with a cold L2 cache. Every kernel's result is compared with the chosen one's first.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from blockscale.bench import peers_gemm
from blockscale.bench.chooser import describe
from blockscale.bench.contest import Call, ready, turns
from blockscale.bench.timing import Timer
from blockscale.dtypes import BFLOAT16
from blockscale.kernels.common.compile_all import compile_all
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.runtime import gpu_of
from blockscale.kernels.sm90.config import Config, choose_config
from blockscale.kernels.sm90.product_config import fit
from blockscale.quantize import quantize

Shape = tuple[int, int, int]

WEIGHTS = 8 << 20, 64 << 20  # N * K
DIMENSION = 1024, 28672
MULTIPLES = 16, 32, 128
CLUSTERS = (1, 1), (2, 1), (1, 2)
SPLIT = {"warpgroup_split_k": True}
#: Fields, and the columns of tiles.
GRID: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (
    ({"rows": 128}, (64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256)),
    ({"rows": 192, "warpgroups": 3}, (64, 96, 112, 128, 160)),
    ({"rows": 256}, (64, 96, 112, 128)),
    ({"rows": 64, **SPLIT}, (48, 64, 80, 96, 112, 128, 192)),
    ({"rows": 128, **SPLIT}, (48, 64, 96, 128)),
)
SPLIT_K = (64, 2), (64, 4), (96, 2), (96, 3), (128, 2), (128, 4)  # columns, CTAs
PEERS = {"DeepGEMM": peers_gemm.deep_gemm, "bf16": peers_gemm.bf16}
_MOST_STAGES = 10
_DIFFERS = 0.02  # of the largest value: sums in another order differ less


def shapes(seed: int, count: int, rows: tuple[int, int] = (65, 1024)) -> Iterator[Shape]:
    """M (of ``rows``), N and K with equally likely logarithms; K is a multiple of 128, as the
    format wants it."""
    rng = random.Random(seed)

    def draw(low: int, high: int, multiple: int) -> int:
        value = math.exp(rng.uniform(math.log(low), math.log(high)))
        return max(multiple, round(value / multiple) * multiple)

    while count:
        m = draw(*rows, rng.choice(MULTIPLES))
        n, k = draw(*DIMENSION, rng.choice(MULTIPLES)), draw(*DIMENSION, 128)
        if rows[0] <= m <= rows[1] and WEIGHTS[0] <= n * k <= WEIGHTS[1]:
            count -= 1
            yield m, n, k


def tile(rows: int, columns: int, **fields: Any) -> Config | None:
    """With as many stages as there is room for; None where there is no such kernel."""
    steps = 1 if columns <= 192 else 2  # accumulators and a partial one fit in registers
    for stages in range(_MOST_STAGES, 1, -1):
        try:
            least = Config(
                BFLOAT16, tile=(rows, columns), mma_n=columns // steps, stages=stages,
                epilogue_stages=1, **fields,
            )  # fmt: skip
        except ValueError:
            continue
        found: Config = fit(least)
        return found
    return None


def grid() -> list[Config]:
    found = [
        tile(columns=columns, cluster=cluster, **fields)
        for fields, widths in GRID
        for columns in widths
        for cluster in CLUSTERS
    ]
    found += [tile(64, n, cluster=(1, 1), split_k=ctas, **SPLIT) for n, ctas in SPLIT_K]
    return [config for config in dict.fromkeys(found) if config is not None]


def measured(
    shape: Shape, configs: list[Config], peers: Sequence[str], timer: Timer
) -> dict[str, Any]:
    m, n, k = shape
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    a, b = quantize(x, "fp8_1x128", layout="sm90"), quantize(w, "fp8_128x128")
    given = a.qdata.view(torch.uint8), a.scale, b.qdata.view(torch.uint8), b.scale
    d = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    gpu, chosen = gpu_of(x.device), choose_config(shape, Epilogue())
    assert gpu is not None

    def call(config: Config) -> Call:
        return partial(gpu.load(config), *given, d, None, None, gpu.multiprocessors)

    call(chosen)()
    want, calls, failed = d.float(), {}, {}
    for config in dict.fromkeys([chosen, *configs]):
        tiles = -(-m // config.tile[0]) * -(-n // config.tile[1])
        if config.split_k > 1 and tiles > gpu.max_active_clusters(config.split_k):
            continue
        d.fill_(math.nan)
        one = ready(partial(call, config))
        error = float((d.float() - want).abs().max() / want.abs().max())
        if isinstance(one, str) or not error < _DIFFERS:
            failed[describe(config)] = one if isinstance(one, str) else f"differs by {error}"
        else:
            calls[describe(config)] = one
    for name in peers:
        one = ready(partial(PEERS[name], x, w))
        if isinstance(one, str):
            failed[name] = one
        else:
            calls[name] = one
    took = {
        name: time if isinstance(time, str) else round(time, 2)
        for name, time in turns(calls, timer, 8).items()
    }
    return {"shape": shape, "chosen": describe(chosen), "microseconds": took, "failed": failed}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--shapes", type=int, default=40)
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--rows", type=int, nargs=2, default=(65, 1024))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    args = parser.parse_args()
    configs, wanted = grid(), list(shapes(args.seed, args.shapes, args.rows))
    compile_all([*configs, *(choose_config(shape, Epilogue()) for shape in wanted)])
    timer, rows = Timer(), []
    for shape in wanted:
        rows.append(measured(shape, configs, args.peers, timer))
        found = {"gpu": torch.cuda.get_device_name(), "seed": args.seed, "shapes": rows}
        args.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for peer in args.peers:
        having = [row for row in rows if peer in row["microseconds"]]
        for what, best in (("the chosen one", False), ("the best tile", True)):
            if having:
                ratios = [_ratio(row, peer, best) for row in having]
                print(f"{peer}, {what}: {geometric_mean(ratios):.3f}, least {min(ratios):.3f}")


def _ratio(row: dict[str, Any], peer: str, best: bool) -> float:
    """The peer's time over that of the chosen tile, or of the best."""
    took = row["microseconds"]
    ours = min(took[name] for name in took if "=" in name) if best else took[row["chosen"]]
    return float(took[peer] / ours)


if __name__ == "__main__":
    main()
