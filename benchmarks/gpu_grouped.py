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
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from gpu_tiles import json_lines

from blockscale.bench.contest import Call, ready, turns
from blockscale.bench.timing import Timer
from blockscale.kernels.common.compile_all import compile_all
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.runtime import gpu_of
from blockscale.kernels.sm90.config import Config, choose_config
from blockscale.kernels.sm90.grouped_config import grouped_candidates, supergroup
from blockscale.quantize import quantize

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
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


def skewed(groups: int, rows: int, multiple: int, seed: int = 0) -> tuple[int, ...]:
    """Multiples with log-normal sizes, of ``rows`` in all."""
    rng = random.Random(groups + seed)
    weights = [math.exp(rng.gauss(0, 1)) for _ in range(groups)]
    units = rows // multiple
    sizes = [max(1, int(each / sum(weights) * units)) for each in weights]
    for i in range(10**6):
        if sum(sizes) == units:
            break
        at = i % groups
        if sum(sizes) < units:
            sizes[at] += 1
        elif sizes[at] > 1:
            sizes[at] -= 1
    return tuple(each * multiple for each in sizes)


def cases() -> Iterator[Case]:
    for groups in (8, 32):
        for n, k in WEIGHTS:
            half = (ROWS // 2, *[ROWS // 2 // (groups - 1) // 128 * 128] * (groups - 1))
            for name, sizes in (
                ("equal", (ROWS // groups,) * groups),
                ("skewed", skewed(groups, ROWS, 128)),
                ("any size", skewed(groups, ROWS, 1, seed=1)),
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
        x = torch.randn(case.m, k, device="cuda", dtype=BF16)
        a = quantize(x, "fp8_1x128", layout="sm90")
        self.a, self.a_scale = a.qdata.view(torch.uint8), a.scale
        self.b = torch.empty(groups, n, k, device="cuda", dtype=torch.uint8)
        self.b_scale = torch.empty(groups, -(-n // 128), -(-k // 128), device="cuda")
        for b, scale in zip(self.b, self.b_scale, strict=True):
            q = quantize(torch.randn(n, k, device="cuda", dtype=BF16), "fp8_128x128")
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


def deep_gemm(case: Case, given: Operands) -> Call:
    library: Any = import_module("deep_gemm")
    if any(size % 128 for size in case.sizes):
        raise ValueError("sizes are no multiples of 128")
    owner = torch.repeat_interleave(
        torch.arange(len(case.sizes), dtype=torch.int32), torch.tensor(case.sizes)
    ).int().cuda()  # fmt: skip
    a = given.a.view(FP8), given.a_scale[:, : case.m].mT
    b = given.b.view(FP8), given.b_scale
    d = torch.empty_like(given.d)
    return lambda: library.m_grouped_fp8_gemm_nt_contiguous(a, b, d, owner)


def torch_rowwise(case: Case, given: Operands) -> Call:
    a, b = given.a.view(FP8), given.b.view(FP8).mT
    a_scale = torch.ones(case.m, device="cuda")
    b_scale = torch.ones(len(case.sizes), case.n, device="cuda")
    product: Any = torch._scaled_grouped_mm
    return lambda: product(
        a, b, a_scale, b_scale, offs=given.offsets, out_dtype=BF16, use_fast_accum=True
    )


def torch_bf16(case: Case, given: Operands) -> Call:
    a, b = given.a.view(FP8).bfloat16(), given.b.view(FP8).bfloat16().mT
    return lambda: torch._grouped_mm(a, b, offs=given.offsets, out_dtype=BF16)


PEERS = {"DeepGEMM": deep_gemm, "torch FP8 row-wise": torch_rowwise, "torch bf16": torch_bf16}


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
        one = ready(partial(prepare, case, given))
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
