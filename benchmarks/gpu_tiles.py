"""Tiles of Hopper's products at shapes drawn at random: the chosen one, and a grid of tiles, of
which the chooser knows some, beside other libraries.

    PYTHONPATH=src python3 benchmarks/gpu_tiles.py FILE.json [--product fp8] [--shapes 40]
        [--seed 22] [--rows 65 1024] [--weights 8 64] [--columns 1024 28672] [--named]
        [--clusters] [--no-peers]

Microseconds with a cold L2 cache. Every kernel's result is compared with the chosen one's first.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from itertools import product as product_of
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

from blockscale.bench import peers_gemm
from blockscale.bench.contest import Call, ready, turns
from blockscale.bench.timing import Timer
from blockscale.dtypes import FLOAT32
from blockscale.kernels.common.compile_all import compile_all
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.loadable import rows_to_load
from blockscale.kernels.common.runtime import gpu_of
from blockscale.kernels.sm90 import bf16_config
from blockscale.kernels.sm90 import config as fp8_config
from blockscale.kernels.sm90.bf16_config import Bf16Config
from blockscale.kernels.sm90.config import Config
from blockscale.kernels.sm90.product_config import ProductConfig, fit
from blockscale.quantize import quantize

Shape = tuple[int, int, int]
Tiling = tuple[Any, ...]  # values of FIELDS

WEIGHTS = 8, 64  # of 2^20 elements
COLUMNS = DEPTH = 1024, 28672  # N and K
MULTIPLES = 16, 32, 128
CLUSTERS = (1, 1), (2, 1), (1, 2)
SPLIT = {"warpgroup_split_k": True}
NAMED: tuple[Shape, ...] = (
    *((size, size, size) for size in (2048, 3072, 4096, 6144, 8192)), (16384, 4096, 7168),
)  # fmt: skip
#: Fields, and the columns of tiles.
GRID: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (
    ({"rows": 128}, (64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256)),
    ({"rows": 192, "warpgroups": 3}, (48, 64, 80, 96, 112, 128, 160, 192)),
    ({"rows": 256}, (64, 96, 112, 128)),
    ({"rows": 64, "warpgroups": 1}, (64, 96, 128, 160, 192, 256)),
    ({"rows": 64, **SPLIT}, (16, 32, 48, 64, 80, 96, 112, 128, 192)),
    ({"rows": 128, **SPLIT}, (48, 64, 96, 128)),
)
SPLIT_K = (64, 2), (64, 4), (64, 8), (96, 2), (96, 3), (128, 2), (128, 4)  # columns, CTAs
#: That tell a tiling.
FIELDS = ("tile", "cluster", "warpgroups", "warpgroup_split_k", "split_k")
_MOST_STAGES = 12
_STEPS = 1, 2, 3  # wgmmas across a tile
_REGISTERS = {1: 192, 2: 192, 3: 128}  # for accumulators, by warpgroups
_DIFFERS = 0.02  # of the largest value: sums in another order differ less

Operands = tuple[Tensor, ...]


@dataclass(frozen=True)
class Product:
    """What is measured.

    Attributes:
        module: has ``choose_config``.
        kind: of a configuration.
        operands: of matrices (M, K) and (N, K) of bf16, as a kernel takes them.
        promotes: whether a wgmma's accumulators are added to others, which want registers, too.
        fields: of ``kind``, for a tile.
        choices: of ``choose_config``.
        epilogue: of all.
        peers: name -> a function that makes what is needed and returns the call to time.
    """

    module: Any
    kind: type[ProductConfig]
    operands: Callable[[Tensor, Tensor], Operands]
    promotes: bool
    peers: Mapping[str, Callable[[Tensor, Tensor], Call]]
    fields: Callable[[int, int], dict[str, Any]] = lambda rows, columns: {}
    choices: dict[str, Any] = field(default_factory=dict)
    epilogue: Epilogue = field(default_factory=Epilogue)

    def choose(self, shape: Shape, gpu: Any) -> Any:
        return self.module.choose_config(shape, self.epilogue, gpu=gpu, **self.choices)


def _fp8(x: Tensor, w: Tensor) -> Operands:
    a, b = quantize(x, "fp8_1x128", layout="sm90"), quantize(w, "fp8_128x128")
    return a.qdata.view(torch.uint8), a.scale, b.qdata.view(torch.uint8), b.scale


def _fp8_1x128(x: Tensor, w: Tensor) -> Operands:
    both = (quantize(each, "fp8_1x128", layout="sm90") for each in (x, w))
    return tuple(each for q in both for each in (q.qdata.view(torch.uint8), q.scale))


def _of_columns(rows: int, columns: int) -> dict[str, Any]:
    """Scales of each column want registers, too: large tiles are unrolled less."""
    unroll = {256: 1, 192: 2 if columns >= 128 else 4}
    return {"b_block": (1, 128), "unroll": unroll.get(rows, 4)}


_ADDED = Epilogue(FLOAT32, accumulate=True)
PRODUCTS = {
    "fp8": Product(
        fp8_config, Config, _fp8, True,
        {"DeepGEMM": peers_gemm.deep_gemm, "bf16": peers_gemm.bf16},
    ),
    "fp8_1x128": Product(
        fp8_config, Config, _fp8_1x128, True,
        {"DeepGEMM": peers_gemm.deep_gemm_added, "cuBLASLt": peers_gemm.cublaslt_1x128},
        _of_columns, {"b_block": (1, 128)}, _ADDED,
    ),
    "bf16": Product(
        bf16_config, Bf16Config, lambda x, w: (x, w), False, {"bf16": peers_gemm.bf16}
    ),
}  # fmt: skip


def shapes(
    seed: int, count: int, rows: tuple[int, int], weights: tuple[int, int], columns: tuple[int, int]
) -> Iterator[Shape]:
    """M (of ``rows``), N and K with equally likely logarithms, so that N * K is one of ``weights``;
    K is a multiple of 128, as the format wants it."""
    rng = random.Random(seed)

    def draw(low: int, high: int, multiple: int) -> int:
        value = math.exp(rng.uniform(math.log(low), math.log(high)))
        return max(multiple, round(value / multiple) * multiple)

    while count:
        m = draw(*rows, rng.choice(MULTIPLES))
        n, k = draw(*columns, rng.choice(MULTIPLES)), draw(*DEPTH, 128)
        if rows[0] <= m <= rows[1] and weights[0] << 20 <= n * k <= weights[1] << 20:
            count -= 1
            yield m, n, k


def tile(product: Product, rows: int, columns: int, **fields: Any) -> ProductConfig | None:
    """With as many stages as there is room for; None where there is no such kernel."""
    split = fields.get("warpgroup_split_k")
    warpgroups = fields.get("warpgroups", 2)
    accumulators = rows // (1 if split else warpgroups) * columns // 128
    room = _REGISTERS[warpgroups] - accumulators
    for steps, stages in product_of(_STEPS, range(_MOST_STAGES, 1, -1)):
        mma_n = columns // steps
        if columns % (16 * steps) or (product.promotes and mma_n // 2 > room):
            continue
        try:
            least = product.kind(
                tile=(rows, columns), mma_n=mma_n, stages=stages, epilogue_stages=1,
                **product.epilogue._asdict(), **product.fields(rows, columns), **fields,
            )  # fmt: skip
        except ValueError:
            continue
        found: ProductConfig = fit(least)
        return found
    return None


def grid(product: Product, m: int, clusters: Sequence[tuple[int, int]]) -> list[ProductConfig]:
    """For ``m`` rows, of which tiles that have more load no others."""
    found = [
        tile(product, columns=columns, cluster=cluster, **fields)
        for fields, widths in GRID
        for columns in widths
        for cluster in clusters
    ]
    found += [tile(product, 64, n, cluster=(1, 1), split_k=ctas, **SPLIT) for n, ctas in SPLIT_K]
    return [
        replace(config, loaded_rows=rows_to_load(m, config.tile[0]))
        if isinstance(config, Config) and m < config.tile[0] and config.multicast_ctas == 1
        else config
        for config in dict.fromkeys(found)
        if config is not None
    ]


def measured(
    product: Product, shape: Shape, configs: list[Any], peers: bool, timer: Timer
) -> tuple[dict[Any, float], dict[str, str]]:
    """Microseconds of tilings and peers; and what could not run, and why. The first of ``configs``
    gives the result that the others must give, too."""
    m, n, k = shape
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    given, added = product.operands(x, w), product.epilogue.accumulate
    d = torch.zeros(m, n, device="cuda", dtype=torch.float32 if added else torch.bfloat16)
    gpu = gpu_of(x.device)
    assert gpu is not None

    def call(config: Any) -> Call:
        groups = (None, None) if isinstance(config, Config) else ()
        return partial(gpu.load(config), *given, d, None, None, *groups, gpu.multiprocessors)

    call(configs[0])()
    want, failed = d.float(), {}
    calls: dict[Any, Call] = {}
    for config in configs:
        if config.split_k > 1 and not config.runs_at_once(m, n, gpu):
            continue
        d.fill_(0 if added else math.nan)
        try:
            call(config)()
            error = float((d.float() - want).abs().max() / want.abs().max())
        except Exception as wrong:
            failed[str(tiling(config))] = str(wrong)
            continue
        if error < _DIFFERS:
            calls[tiling(config)] = call(config)
        else:
            failed[str(tiling(config))] = f"differs by {error}"
    for name, prepare in product.peers.items() if peers else ():
        one = ready(partial(prepare, x, w))
        if isinstance(one, str):
            failed[name] = one
        else:
            calls[name] = one
    took: dict[Any, float] = {}
    for name, time in turns(calls, timer, 8).items():
        if isinstance(time, str):
            failed[str(name)] = time
        else:
            took[name] = round(time, 2)
    return took, failed


def tiling(config: ProductConfig) -> Tiling:
    return tuple(getattr(config, name) for name in FIELDS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--product", choices=PRODUCTS, default="fp8")
    parser.add_argument("--shapes", type=int, default=40)
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--rows", type=int, nargs=2, default=(65, 1024))
    parser.add_argument("--weights", type=int, nargs=2, default=WEIGHTS, help="of 2^20 elements")
    parser.add_argument("--columns", type=int, nargs=2, default=COLUMNS)
    parser.add_argument("--named", action="store_true", help="and squares")
    parser.add_argument("--clusters", action="store_true", help="of two CTAs, too")
    parser.add_argument("--no-peers", action="store_true")
    args = parser.parse_args()
    product, clusters = PRODUCTS[args.product], CLUSTERS if args.clusters else CLUSTERS[:1]
    gpu: Any = gpu_of(torch.device("cuda", 0))
    wanted = [
        *shapes(args.seed, args.shapes, args.rows, args.weights, args.columns),
        *(NAMED if args.named else ()),
    ]
    configs: list[dict[Any, Any]] = []
    for shape in wanted:
        found = [product.choose(shape, gpu), *grid(product, shape[0], clusters)]
        configs.append({tiling(each): each for each in (*found, found[0])})
    compile_all(dict.fromkeys(chain.from_iterable(each.values() for each in configs)))
    tilings = list(dict.fromkeys(chain.from_iterable(configs)))
    head: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "dram_rate": gpu.dram_rate,
        "product": args.product,
        "seed": args.seed,
        "rows": args.rows,
        "weights": args.weights,
        "columns": args.columns,
        "tilings": [dict(zip(FIELDS, each, strict=True)) for each in tilings],
    }
    timer = Timer()
    rows: list[dict[str, Any]] = []
    for shape, these in zip(wanted, configs, strict=True):
        chosen = next(iter(these))
        took, failed = measured(product, shape, list(these.values()), not args.no_peers, timer)
        rows.append({
            "shape": shape,
            "chosen": tilings.index(chosen),
            "microseconds": [took.get(each) for each in tilings],
            "peers": {name: took[name] for name in product.peers if name in took},
            "failed": failed,
        })  # fmt: skip
        args.file.write_text(json_lines({**head, "shapes": rows}), encoding="utf-8")
    for peer in product.peers:
        having = [row for row in rows if peer in row["peers"]]
        for what, best in (("the chosen one", False), ("the best tile", True)):
            if having:
                ratios = [_ratio(row, peer, best) for row in having]
                print(f"{peer}, {what}: {geometric_mean(ratios):.3f}, least {min(ratios):.3f}")


def json_lines(result: dict[str, Any]) -> str:
    """JSON with a line for each item of each list."""
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
