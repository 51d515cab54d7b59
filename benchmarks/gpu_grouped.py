"""Products of grouped rows on Hopper beside other libraries, one product of as many rows, and other
tiles.

    PYTHONPATH=src python3 benchmarks/gpu_grouped.py FILE.json [--only NAME] [--supergroups]
        [--no-peers] [--rounds 4]

Microseconds with a cold L2 cache, and TFLOP/s. Every kernel's result is compared with the chosen
one's first. DeepGEMM wants sizes that are multiples of 128.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import torch
from gpu_tiles import json_lines

from blockscale.bench import peers_grouped
from blockscale.bench.contest import Call, ready, turns
from blockscale.bench.grouped import skewed
from blockscale.bench.timing import Timer
from blockscale.kernels.common.compile_all import compile_all
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.runtime import gpu_of
from blockscale.kernels.sm90.config import Config, choose_config
from blockscale.kernels.sm90.grouped_config import grouped_candidates, supergroup
from blockscale.quantize import quantize

BF16 = torch.bfloat16
Way = tuple[Config, int]  # a kernel, and its supergroup

ROWS = 32768
WEIGHTS = (4096, 7168), (7168, 2048)  # N, K
TILES = 3  # that are measured
SUPERGROUPS = 1, 4, 8, 64
_DIFFERS = 0.02


@dataclass(frozen=True)
class Case:
    """A product: its name, rows of each group, N and K."""

    name: str
    sizes: tuple[int, ...]
    n: int
    k: int

    @property
    def m(self) -> int:
        return sum(self.sizes)


def any_size(groups: int, rows: int) -> tuple[int, ...]:
    """Of skewed groups, whose ends are moved by up to 63 rows."""
    rng = random.Random(groups)
    ends = list(accumulate(skewed(groups, rows)))
    moved = sorted(end + rng.randint(-63, 63) for end in ends[:-1])
    return tuple(end - start for start, end in pairwise([0, *moved, rows]))


def cases() -> Iterator[Case]:
    for groups in (8, 32):
        for n, k in WEIGHTS:
            half = (ROWS // 2, *[ROWS // 2 // (groups - 1) // 128 * 128] * (groups - 1))
            for name, sizes in (
                ("equal", (ROWS // groups,) * groups),
                ("skewed", skewed(groups, ROWS)),
                ("any size", any_size(groups, ROWS)),
                ("half in one", half),
            ):
                yield Case(name, sizes, n, k)
    for n, k in WEIGHTS:
        yield Case("256 of 128", (128,) * 256, n, k)
        yield Case("one group", (ROWS,), n, k)


class Operands:
    """Random data with scales, and the output."""

    def __init__(self, case: Case):
        torch.manual_seed(0)
        groups, n, k = len(case.sizes), case.n, case.k
        self.x = torch.randn(case.m, k, device="cuda", dtype=BF16)
        self.w = torch.randn(groups, n, k, device="cuda", dtype=BF16)
        a = quantize(self.x, "fp8_1x128", layout="sm90")
        self.a, self.a_scale = a.qdata.view(torch.uint8), a.scale
        self.b = torch.empty(groups, n, k, device="cuda", dtype=torch.uint8)
        self.b_scale = torch.empty(groups, -(-n // 128), -(-k // 128), device="cuda")
        for w, b, scale in zip(self.w, self.b, self.b_scale, strict=True):
            q = quantize(w, "fp8_128x128")
            b.copy_(q.qdata.view(torch.uint8))
            scale.copy_(q.scale)
        self.offsets = torch.tensor(case.sizes, device="cuda").cumsum(0).int()
        self.d = torch.empty(case.m, n, device="cuda", dtype=BF16)

    def grouped(self, config: Config, height: int, gpu: Any) -> Call:
        """``height``: the supergroup."""
        given = self.a, self.a_scale, self.b.flatten(0, 1), self.b_scale, self.d
        groups = None, None, self.offsets, height
        return partial(gpu.load(config), *given, *groups, gpu.multiprocessors)

    def dense(self, config: Config, gpu: Any) -> Call:
        """All rows by the first group's matrix."""
        given = self.a, self.a_scale, self.b[0], self.b_scale[0], self.d
        return partial(gpu.load(config), *given, None, None, None, None, gpu.multiprocessors)


PEERS = {
    "DeepGEMM": peers_grouped.deep_gemm,
    "torch FP8 row-wise": peers_grouped.row_wise,
    "torch bf16": peers_grouped.bf16,
}


def ways(case: Case, gpu: Any, supergroups: Sequence[int]) -> list[Way]:
    """The chosen one first."""
    shape, groups = (case.m, case.n, case.k), len(case.sizes)
    found = grouped_candidates(shape, groups, Epilogue(), gpu=gpu)[:TILES]
    chosen = [(each, supergroup(each.tile, case.k, gpu.multiprocessors)) for each in found]
    return list(dict.fromkeys((*chosen, *((found[0], height) for height in supergroups))))


def measured(
    case: Case, found: Sequence[Way], peers: bool, timer: Timer, rounds: int
) -> dict[str, Any]:
    gpu = gpu_of(torch.device("cuda", 0))
    assert gpu is not None
    given = Operands(case)
    failed: dict[str, Any] = {}
    calls: dict[Any, Call] = {}
    given.grouped(*found[0], gpu)()
    want = given.d.clone()
    for config, height in found:
        given.d.fill_(math.nan)
        call = given.grouped(config, height, gpu)
        call()
        error = float((given.d - want).abs().max() / want.abs().max())
        if error < _DIFFERS:
            calls[str((*config.tile, height))] = call
        else:
            failed[str(config.tile)] = f"differs by {error}"
    dense = choose_config((case.m, case.n, case.k), Epilogue(), gpu=gpu)
    calls["one product"] = given.dense(dense, gpu)
    for name, prepare in PEERS.items() if peers else ():
        one = ready(partial(prepare, given.x, given.w, case.sizes))
        if isinstance(one, str):
            failed[name] = one
        else:
            calls[name] = one
    took = in_any_order(calls, timer, rounds, random.Random(repr(case)))
    tera = 2e-6 * case.m * case.n * case.k
    return {
        "name": case.name,
        "shape": (len(case.sizes), case.m, case.n, case.k),
        "chosen": next(iter(calls)),
        "microseconds": {name: round(each, 1) for name, each in took.items()},
        "teraflops": {name: round(tera / each) for name, each in took.items()},
        "failed": failed,
    }


def in_any_order(
    calls: dict[str, Call], timer: Timer, rounds: int, rng: random.Random
) -> dict[str, float]:
    """Microseconds: a mean over rounds, each in another order: the calls before heat the chip."""
    found = dict.fromkeys(calls, 0.0)
    for _ in range(rounds):
        names = rng.sample(list(calls), len(calls))
        for name, each in turns({name: calls[name] for name in names}, timer, 6).items():
            found[name] += float(each) / rounds
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--only")
    parser.add_argument("--supergroups", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    gpu: Any = gpu_of(torch.device("cuda", 0))
    wanted = [each for each in cases() if args.only in (None, each.name)]
    found = [ways(case, gpu, SUPERGROUPS if args.supergroups else ()) for case in wanted]
    dense = [choose_config((each.m, each.n, each.k), Epilogue(), gpu=gpu) for each in wanted]
    compile_all(dict.fromkeys((*(config for config, _ in chain.from_iterable(found)), *dense)))
    timer, rows = Timer(), []
    for case, these in zip(wanted, found, strict=True):
        rows.append(measured(case, these, not args.no_peers, timer, args.rounds))
        print(
            rows[-1]["name"],
            rows[-1]["shape"],
            rows[-1]["teraflops"],
            rows[-1]["failed"],
            flush=True,
        )
        head = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        args.file.write_text(json_lines({**head, "cases": rows}), encoding="utf-8")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
