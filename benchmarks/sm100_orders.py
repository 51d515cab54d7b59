"""Run each product for Blackwell of tests/kernels/sm100_orders.py in every order: all completion
policies and 20 seeds, with all checks of the emulator.

    python benchmarks/sm100_orders.py    # writes benchmarks/results/sm100_orders.json

A run is right if the output is the reference's, bit for bit. An error of the emulator (a race, a
deadlock, something left in flight or not freed) counts as wrong, and is kept.
"""

from __future__ import annotations

import datetime
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "kernels"))
from sm100_orders import CASES, ORDERS  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "sm100_orders.json"


def outcome(name: str) -> dict[str, Any]:
    """Of all orders of a kernel."""
    case = CASES[name]
    right, wrong = 0, []
    for completion, seed in ORDERS:
        try:
            said = "" if case.right(completion, seed) else "wrong result"
        except Exception as error:
            said = f"{type(error).__name__}: {error}".split("\n")[0]
        right += not said
        if said:
            wrong.append(f"{completion}, seed {seed}: {said}")
    return {"shape": case.shape, "right": right, "wrong": wrong}


def main() -> None:
    cases = {}
    with ProcessPoolExecutor(
        mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        for name, found in zip(CASES, pool.map(outcome, CASES), strict=True):
            cases[name] = found
            print(name, found, flush=True)
    result = {
        "what": "products for Blackwell in the emulator, each under every completion policy and "
        "seed with all checks: bitwise the reference, no races, nothing left behind",
        "date": datetime.date.today().isoformat(),
        "orders": ORDERS,
        "runs": len(CASES) * len(ORDERS),
        "right": sum(case["right"] for case in cases.values()),
        "cases": cases,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
