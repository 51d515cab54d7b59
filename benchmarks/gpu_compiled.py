"""Time models under torch.compile on a GPU: what keeps the host busy, and the first step.

Two layers of 1024 with a GELU between them, for 128 tokens; and four transformer blocks of 1024,
for 4,096 tokens. Each recipe beside bf16, compiled and eager. Prints JSON, or writes it to a file;
call it twice for the first step with warm caches.

    python benchmarks/gpu_compiled.py [results.json] [recipe ...]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockscale as bs

BF16 = "bf16"
WIDTH, HEADS = 1024, 16


class Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.first(x)).view(batch, tokens, 3, HEADS, -1)
        heads = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.second(x))))


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, False), nn.GELU(), nn.Linear(WIDTH, WIDTH, False))


def four_blocks() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(4)))


MODELS = {
    "two layers, 128 tokens": (two_layers, (128, WIDTH)),
    "four blocks, 4096 tokens": (four_blocks, (4, 1024, WIDTH)),
}


def host_microseconds(step: Callable[[], object], repeats: int = 100) -> float:
    """Median time in which a step is queued on an idle device."""
    took = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        took.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return round(statistics.median(took) * 1e6)


def step_milliseconds(step: Callable[[], object], repeats: int = 30) -> float:
    """Mean time of steps, one after another."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    torch.cuda.synchronize()
    return round((time.perf_counter() - start) / repeats * 1e3, 3)


def measure(name: str, recipe: str) -> dict[str, float]:
    """Forward and backward of one model."""
    make, shape = MODELS[name]
    torch.compiler.reset()
    model = make().to("cuda", torch.bfloat16)
    if recipe != BF16:
        model = bs.convert(model, bs.Recipe(recipe))
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad, found = torch.randn_like(x), {}
    for how, run in (("compiled", torch.compile(model)), ("eager", model)):

        def step(run: nn.Module = run) -> None:
            run(x).backward(grad)

        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        found[f"{how}_first_s"] = round(time.perf_counter() - start, 2)
        step()
        step()
        found[f"{how}_host_us"] = host_microseconds(step)
        found[f"{how}_step_ms"] = step_milliseconds(step)
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    given = sys.argv[1:]
    path = Path(given.pop(0)) if given and given[0].endswith(".json") else None
    torch.compile(lambda x: x + 1)(torch.ones(8, device="cuda"))  # imports, and starts of workers
    rows = [
        {"model": name, "recipe": recipe, **measure(name, recipe)}
        for recipe in given or ["mxfp8", "nvfp4", "fp8_block", BF16]
        for name in MODELS
    ]
    device = torch.cuda.get_device_name()
    text = json.dumps({"gpu": device, "torch": torch.__version__, "rows": rows}, indent=1) + "\n"
    print(text)
    if path is not None:
        path.write_text(text)


if __name__ == "__main__":
    main()
