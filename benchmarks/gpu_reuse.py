"""A layer forward and backward on a GPU, its weight quantized in every pass or reused.

``python benchmarks/gpu_reuse.py OUT.json``. Both in turn, several times; medians of medians.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from pathlib import Path

import torch

import blockscale as bs
from blockscale.bench.linear import train_step
from blockscale.bench.timing import Timer

SHAPES = ((16384, 4096, 7168), (8192, 8192, 8192))  # rows, inputs, outputs
RECIPES = {
    "fp8_block": bs.Recipe("fp8_1x128", weights="fp8_128x128"),
    "mxfp8": bs.Recipe(),
    "nvfp4": bs.Recipe("nvfp4"),
}
ROUNDS = 15


def measure(
    timer: Timer, recipe: str, dtype: torch.dtype, shape: tuple[int, int, int]
) -> dict[str, object]:
    m, k, n = shape
    torch.manual_seed(0)
    layer = bs.nn.Linear(k, n, False, "cuda", dtype, recipe=RECIPES[recipe])
    plain = torch.nn.Linear(k, n, False, "cuda", torch.bfloat16)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    found: dict[str, list[float]] = {"each_pass": [], "reused": [], "torch_bf16": []}
    for turn in range(ROUNDS):
        for name in list(found) if turn % 2 else reversed(list(found)):
            one = plain if name == "torch_bf16" else layer
            block = bs.reuse_weights() if name == "reused" else contextlib.nullcontext()
            with block:
                took = timer.microseconds(lambda one=one: train_step(one, one.weight, x, grad), 20)
            found[name].append(took)
    medians = {name: statistics.median(took) for name, took in found.items()}
    ratios = [a / b for a, b in zip(found["each_pass"], found["reused"], strict=True)]
    return {
        **{"recipe": recipe, "weight": str(dtype), "rows": m, "inputs": k, "outputs": n},
        "microseconds": medians,
        "each_pass_over_reused": statistics.median(ratios),
        "least_and_most": [min(ratios), max(ratios)],
    }


def main() -> None:
    timer, results = Timer(), []
    for shape in SHAPES:
        for recipe in RECIPES:
            for dtype in (torch.bfloat16, torch.float32):
                results.append(measure(timer, recipe, dtype, shape))
                print(json.dumps(results[-1]), flush=True)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    Path(sys.argv[1]).write_text(json.dumps({**about, "layers": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
