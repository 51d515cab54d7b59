"""What a watched step of training takes, over one that is not watched, on a CPU or a GPU.

``python benchmarks/watch.py OUT.json [cpu|cuda]``. Of each pair of steps of one run the first is
watched (``every=2``); medians over pairs, after the first few.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

import blockscale as bs
from blockscale.training.gpt import GPT, VOCABULARY, in_block
from blockscale.training.recipes import RECIPES

PAIRS, FIRST = 15, 3
NAMES = ("mxfp8", "nvfp4", "fp8_block")


class Size(NamedTuple):
    """Of a model and its batch."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int


SIZES = {
    "cpu": (Size(192, 3, 3, 128, 4), Size(256, 4, 4, 128, 8), Size(512, 2, 8, 256, 8)),
    "cuda": (Size(1024, 12, 16, 1024, 16), Size(4096, 4, 32, 2048, 8)),
}


def measure(recipe: str, size: Size, device: str) -> dict[str, object]:
    torch.manual_seed(0)
    *shape, batch = size
    with torch.device(device):
        model = GPT(*shape, device == "cuda")
        tokens = torch.randint(VOCABULARY, (batch, size.context + 1))
    bs.convert(model, RECIPES[recipe], in_block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        began = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            logits = model(tokens[:, :-1])
        cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    with tempfile.TemporaryDirectory() as folder, bs.debug.watch(model, every=2, out=folder):
        pairs = [(step(), step()) for _ in range(FIRST + PAIRS)][FIRST:]
    ratios = sorted(watched / plain for watched, plain in pairs)
    return {
        "recipe": recipe,
        **size._asdict(),
        "watched_ms": round(1e3 * statistics.median(w for w, _ in pairs), 2),
        "unwatched_ms": round(1e3 * statistics.median(p for _, p in pairs), 2),
        "ratio": round(statistics.median(ratios), 3),
        "quartiles": [round(ratios[PAIRS // 4], 3), round(ratios[-1 - PAIRS // 4], 3)],
    }


def main() -> None:
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    results = []
    for size in SIZES[device]:
        for recipe in NAMES:
            results.append(measure(recipe, size, device))
            print(json.dumps(results[-1]), flush=True)
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    about = {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}
    Path(sys.argv[1]).write_text(json.dumps({**about, "steps": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
