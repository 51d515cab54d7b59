"""Quantizers with other numbers of warps and of blocks on a multiprocessor, beside what is chosen.

    PYTHONPATH=src python3 benchmarks/gpu_quantize_tiles.py FILE.json

Shares of the device's own copy of as many bytes, with a cold L2 cache. Each variant's bytes are
compared with the chosen kernel's first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from blockscale.bench.cases import Case, prepare
from blockscale.bench.contest import Call, turns
from blockscale.bench.timing import Timer
from blockscale.kernels.common.compile_all import compile_all
from blockscale.kernels.quantizers import plan
from blockscale.kernels.quantizers.config import Config

_ROWS, _BOTH = (-1,), (-1, -2)
CASES = (
    Case("mxfp8", _BOTH, "packed", k_major=True),
    Case("fp8_1x128", _BOTH, "sm90", k_major=True),
    Case("nvfp4", _BOTH, "tcgen05"),
    Case("nvfp4", _ROWS, "tcgen05"),
    Case("mxfp8", _ROWS, "tcgen05"),
    Case("mxfp8", _BOTH, "tcgen05"),
    Case("fp8_1x128", _ROWS, "sm90"),
)
SHAPES = ((4096, 4096), (16384, 7168), (32768, 2048))
WARPS, RESIDENT = (4, 8), (0, 2, 3, 4, 5, 6)
CHOSEN = "chosen"
REPEATS = 20

Variant = tuple[int, int] | None  # warps and blocks; None for what is chosen
VARIANTS: dict[str, Variant] = {
    CHOSEN: None,
    **{f"{w} warps, {r} blocks": (w, r) for w, r in product(WARPS, RESIDENT)},
}


def varied(config: Config, variant: Variant) -> Config:
    return replace(config, warps=variant[0], resident=variant[1]) if variant else config


@contextmanager
def changed(variant: Variant, seen: list[Config]) -> Iterator[None]:
    """Inside, kernels are chosen with ``variant``; ``seen`` gets what was chosen without."""
    choose = plan.choose_config

    def other(*args: Any) -> Config:
        seen.append(choose(*args))
        return varied(seen[-1], variant)

    plan.choose_config = other
    plan.plan_quantize.cache_clear()
    try:
        yield
    finally:
        plan.choose_config = choose
        plan.plan_quantize.cache_clear()


def prepared(case: Case, shape: tuple[int, int], variant: Variant, seen: list[Config]) -> Call:
    """A call by a kernel of ``variant``, of the same input for all."""
    torch.manual_seed(0)
    call = prepare(case, *shape)

    def again() -> object:
        with changed(variant, seen):
            return call()

    return again


def measure(case: Case, shape: tuple[int, int], timer: Timer) -> dict[str, Any]:
    want, calls, failed = None, {}, {}
    for name, variant in VARIANTS.items():
        call = prepared(case, shape, variant, [])
        try:
            found: Any = call()
            same = want is None or all(
                torch.equal(x.view(torch.uint8), y.view(torch.uint8))
                for a, b in zip(found, want, strict=True)
                for x, y in zip(a, b, strict=True)
            )
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            continue
        want = want or found
        if same:
            calls[name] = call
        else:
            failed[name] = "other bytes"
    took = turns(calls, timer, REPEATS)
    copy = timer.copy(case.nbytes(*shape))
    shares = {name: round(copy / t, 3) for name, t in took.items() if isinstance(t, float)}
    return {"case": case.name, "shape": shape, "of_copy": shares, "failed": failed}


def main(path: str) -> None:
    where, chosen = list(product(CASES, SHAPES)), list[Config]()
    for case, shape in where:
        prepared(case, shape, None, chosen)()
    compile_all(varied(*each) for each in product(chosen, VARIANTS.values()))
    timer, rows = Timer(), []
    for case, shape in where:
        rows.append(measure(case, shape, timer))
        shares = rows[-1]["of_copy"]
        best = max(shares, key=shares.__getitem__)
        print(f"{case.name}, {shape}: {shares[CHOSEN]}; {best}: {shares[best]}")
    found = {"gpu": torch.cuda.get_device_name(), "rows": rows}
    Path(path).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
