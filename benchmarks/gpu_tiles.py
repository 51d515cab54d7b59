"""Tiles of the FP8 product on Hopper, 1x128 by 128x128, at shapes drawn at random: the chosen one,
and a grid of tiles and clusters, of which it knows some, beside DeepGEMM and bf16.

    PYTHONPATH=src python3 benchmarks/gpu_tiles.py FILE.json [--shapes 40] [--seed 22]
        [--rows 65 1024] [--named] [--peers DeepGEMM bf16]

Microseconds with a cold L2 cache. Every kernel's result is compared with the chosen one's first.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
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
from blockscale.kernels.common.loadable import rows_to_load
from blockscale.kernels.common.runtime import gpu_of
from blockscale.kernels.sm90.config import Config, choose_config
from blockscale.kernels.sm90.product_config import fit
from blockscale.quantize import quantize

Shape = tuple[int, int, int]
Tiling = tuple[Any, ...]  # values of FIELDS

WEIGHTS = 8 << 20, 64 << 20  # N * K
DIMENSION = 1024, 28672
MULTIPLES = 16, 32, 128
CLUSTERS = (1, 1), (2, 1), (1, 2)
SPLIT = {"warpgroup_split_k": True}
NAMED: tuple[Shape, ...] = (
    *((size, size, size) for size in (2048, 3072, 4096, 6144, 8192)), (16384, 4096, 7168),
)  # fmt: skip
#: Fields, and the columns of tiles.
GRID: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (
    ({"rows": 128}, (64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256)),
    ({"rows": 192, "warpgroups": 3}, (48, 64, 80, 96, 112, 128)),
    ({"rows": 256}, (64, 96, 112, 128)),
    ({"rows": 64, "warpgroups": 1}, (64, 96, 128, 160, 192, 256)),
    ({"rows": 64, **SPLIT}, (48, 64, 80, 96, 112, 128, 192)),
    ({"rows": 128, **SPLIT}, (48, 64, 96, 128)),
)
SPLIT_K = (64, 2), (64, 4), (96, 2), (96, 3), (128, 2), (128, 4)  # columns, CTAs
PEERS = {"DeepGEMM": peers_gemm.deep_gemm, "bf16": peers_gemm.bf16}
#: That tell a tiling.
FIELDS = ("tile", "cluster", "warpgroups", "warpgroup_split_k", "split_k")
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


def grid(m: int) -> list[Config]:
    """For ``m`` rows, of which tiles that have more load no others."""
    found = [
        tile(columns=columns, cluster=cluster, **fields)
        for fields, widths in GRID
        for columns in widths
        for cluster in CLUSTERS
    ]
    found += [tile(64, n, cluster=(1, 1), split_k=ctas, **SPLIT) for n, ctas in SPLIT_K]
    return [
        replace(config, loaded_rows=rows_to_load(m, config.tile[0]))
        if m < config.tile[0] and config.multicast_ctas == 1
        else config
        for config in dict.fromkeys(found)
        if config is not None
    ]


def measured(
    shape: Shape, configs: list[Config], peers: Sequence[str], timer: Timer
) -> tuple[dict[Any, float], dict[str, str]]:
    """Microseconds of tilings and peers; and what could not run, and why. The first of ``configs``
    gives the result that the others must give, too."""
    m, n, k = shape
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    a, b = quantize(x, "fp8_1x128", layout="sm90"), quantize(w, "fp8_128x128")
    given = a.qdata.view(torch.uint8), a.scale, b.qdata.view(torch.uint8), b.scale
    d = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    gpu = gpu_of(x.device)
    assert gpu is not None

    def call(config: Config) -> Call:
        return partial(gpu.load(config), *given, d, None, None, gpu.multiprocessors)

    call(configs[0])()
    want, calls, failed = d.float(), {}, {}
    for config in configs:
        if config.split_k > 1 and not config.runs_at_once(m, n, gpu):
            continue
        d.fill_(math.nan)
        one = ready(partial(call, config))
        error = float((d.float() - want).abs().max() / want.abs().max())
        if isinstance(one, str) or not error < _DIFFERS:
            failed[describe(config)] = one if isinstance(one, str) else f"differs by {error}"
        else:
            calls[tiling(config)] = one
    for name in peers:
        one = ready(partial(PEERS[name], x, w))
        if isinstance(one, str):
            failed[name] = one
        else:
            calls[name] = one
    took = {}
    for name, time in turns(calls, timer, 8).items():
        if isinstance(time, str):
            failed[str(name)] = time
        else:
            took[name] = round(time, 2)
    return took, failed


def tiling(config: Config) -> Tiling:
    return tuple(getattr(config, name) for name in FIELDS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--shapes", type=int, default=40)
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--rows", type=int, nargs=2, default=(65, 1024))
    parser.add_argument("--named", action="store_true", help="and squares")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    args = parser.parse_args()
    gpu = gpu_of(torch.device("cuda", 0))
    wanted = [*shapes(args.seed, args.shapes, args.rows), *(NAMED if args.named else ())]
    configs = []
    for shape in wanted:
        found = [choose_config(shape, Epilogue(), gpu=gpu), *grid(shape[0])]
        configs.append({tiling(each): each for each in (*found, found[0])})
    compile_all(dict.fromkeys(chain.from_iterable(each.values() for each in configs)))
    tilings = list(dict.fromkeys(chain.from_iterable(configs)))
    timer, rows = Timer(), []
    for shape, these in zip(wanted, configs, strict=True):
        chosen = next(iter(these))
        took, failed = measured(shape, list(these.values()), args.peers, timer)
        rows.append({
            "shape": shape,
            "chosen": tilings.index(chosen),
            "microseconds": [took.get(each) for each in tilings],
            "peers": {name: took[name] for name in args.peers if name in took},
            "failed": failed,
        })  # fmt: skip
    result = {
        "gpu": torch.cuda.get_device_name(),
        "dram_rate": gpu.dram_rate,
        "seed": args.seed,
        "tilings": [dict(zip(FIELDS, each, strict=True)) for each in tilings],
        "shapes": rows,
    }
    args.file.write_text(_lines(result), encoding="utf-8")
    for peer in args.peers:
        having = [row for row in rows if peer in row["peers"]]
        for what, best in (("the chosen one", False), ("the best tile", True)):
            if having:
                ratios = [_ratio(row, peer, best) for row in having]
                print(f"{peer}, {what}: {geometric_mean(ratios):.3f}, least {min(ratios):.3f}")


def _lines(result: dict[str, Any]) -> str:
    """JSON with a line for each shape and each tiling."""
    parts = []
    for key, value in result.items():
        if isinstance(value, list):
            value = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        else:
            value = json.dumps(value)
        parts.append(f"{json.dumps(key)}: {value}")
    return "{" + ",\n".join(parts) + "}\n"


def _ratio(row: dict[str, Any], peer: str, best: bool) -> float:
    """The peer's time over that of the chosen tile, or of the best."""
    took = row["microseconds"]
    ours = min(each for each in took if each) if best else took[row["chosen"]]
    return float(row["peers"][peer] / ours)


if __name__ == "__main__":
    main()
