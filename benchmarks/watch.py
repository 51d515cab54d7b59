"""What a watched step of training takes, over one that is not watched, on a CPU or a GPU.

``python benchmarks/watch.py OUT.json [cpu|cuda|host]``. Of each pair of steps of one run the first
is watched (``every=2``); medians over pairs, after the first few.

``host``: what a GPU's host does in a watched step alone, in microseconds for each tensor and
product, and operations of torch among that, each of which takes longer on a GPU. A CPU stands in
for a GPU whose kernels do nothing, but that one's that looks at a tensor, which copies a row of
words that it might have written.
"""

from __future__ import annotations

import ctypes
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

import blockscale as bs
from blockscale.formats import UE4M3, get_format
from blockscale.kernels.common.gpu import GPUS
from blockscale.kernels.common.runtime import standing_in
from blockscale.kernels.watch.config import WatchConfig, Word
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
SMALL = Size(128, 12, 4, 32, 4)  # operations take little more than their calls
SEEN = 4 * 6  # tensors and products of a layer of the GPT

Step = Callable[[], float]


def training(
    recipe: str, size: Size, device: str, clock: Callable[[], float] = time.perf_counter
) -> tuple[torch.nn.Module, Step]:
    """A model, and what trains it for a step and says how long that took."""
    torch.manual_seed(0)
    *shape, batch = size
    with torch.device(device):
        model = GPT(*shape, device == "cuda")
        tokens = torch.randint(VOCABULARY, (batch, size.context + 1))
    bs.convert(model, RECIPES[recipe], in_block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        began = clock()
        with torch.autocast(device, torch.bfloat16):
            logits = model(tokens[:, :-1])
        cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        return clock() - began

    return model, step


def measure(recipe: str, size: Size, device: str) -> dict[str, object]:
    model, step = training(recipe, size, device)
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


@contextmanager
def no_kernels() -> Iterator[None]:
    """CPU tensors are those of a GPU whose kernels do nothing."""

    def load(config: Any) -> Callable[..., None]:
        if not isinstance(config, WatchConfig):
            return lambda *given: None
        words = written(config)

        def write(*given: Any) -> None:
            rows, which = given[-2]
            place = rows.data_ptr() + 4 * rows.stride(0) * which
            ctypes.memmove(place, words.ctypes.data, words.nbytes)  # no operation of torch

        return write

    with standing_in({torch.device("cpu"): replace(GPUS["sm_90a"], load=load)}.get):
        yield


def written(config: WatchConfig) -> np.ndarray:
    """A row of words as of a tensor in training: as many codes of scales occur."""
    words = np.zeros(int(Word.PICKS), np.int32)
    floats, doubles = words.view(np.float32), words.view(np.float64)
    middle, codes = (80, 40) if get_format(config.format).scale is UE4M3 else (118, 5)
    words[middle : middle + codes] = 1234
    words[Word.OCTAVES : Word.OCTAVES + 16] = 256
    words[Word.COMPARED] = 4096
    words[Word.ZEROS : Word.FIRST] = 0, 137, 21
    floats[Word.AMAX], floats[Word.GLOBAL_SCALE] = 1.40625, 0.01
    doubles[Word.SIGNAL // 2], doubles[Word.NOISE // 2] = 123.4, 0.1234
    return words


def measure_host(recipe: str) -> dict[str, object]:
    records = SEEN * SMALL.layers
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # of what kernels leave unwritten
    with no_kernels(), tempfile.TemporaryDirectory() as folder:
        model, step = training(recipe, SMALL, "cpu", time.process_time)
        with bs.debug.watch(model, every=2, out=folder) as files:
            steps = [step() for _ in range(2 * (FIRST + 3 * PAIRS))][2 * FIRST :]
            operations = []
            for _ in range(2):
                with profile(activities=[ProfilerActivity.CPU]) as seen:
                    step()
                operations.append(sum(e.name.startswith("aten::") for e in seen.events()))
        lines = files.jsonl.read_text().splitlines()
    assert len(lines) == records * (FIRST + 3 * PAIRS + 1)
    more = sorted(a - b for a, b in zip(steps[::2], steps[1::2], strict=True))
    quartiles = [more[len(more) // 4], statistics.median(more), more[-1 - len(more) // 4]]
    return {
        "recipe": recipe,
        **SMALL._asdict(),
        "records": records,
        "host_us": [round(1e6 * each / records, 1) for each in quartiles],
        "torch_operations": round((operations[0] - operations[1]) / records, 2),
    }


def main() -> None:
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    results = []
    for size in SIZES.get(device, (SMALL,)):
        for recipe in NAMES:
            of_host = device == "host"
            results.append(measure_host(recipe) if of_host else measure(recipe, size, device))
            print(json.dumps(results[-1]), flush=True)
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    about = {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}
    Path(sys.argv[1]).write_text(json.dumps({**about, "steps": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
