"""A layer of experts on a GPU, forward and backward, beside plain bf16.

    PYTHONPATH=src python3 benchmarks/gpu_moe.py FILE.json [--only NAME] [--rounds 3]

Milliseconds, routing given: 16,384 tokens, experts drawn at random. "bf16" gathers, multiplies by
torch's ``_grouped_mm`` and adds up by autograd. "reused" takes the weights as quantized before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from gpu_tiles import json_lines

import blockscale as bs

BF16 = torch.bfloat16
TOKENS = 16384
RECIPES = {"fp8_block": bs.Recipe("fp8_block"), "mxfp8": bs.Recipe("mxfp8")}


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    experts: int
    top_k: int


SHAPES = {
    "Qwen3-MoE": Shape(2048, 768, 128, 8),
    "Mixtral": Shape(4096, 14336, 8, 2),
    "DeepSeek-V3": Shape(7168, 2048, 256, 8),
}


def operands(shape: Shape) -> tuple[list[torch.Tensor], bs.Routing, torch.Tensor]:
    torch.manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", dtype=BF16)

    count, hidden, inner = shape.experts, shape.hidden, shape.intermediate
    up, down = normal(count, 2 * inner, hidden), normal(count, hidden, inner)
    leaves = normal(TOKENS, hidden), torch.rand(TOKENS, shape.top_k, device="cuda").to(BF16), \
        up.mul_(hidden**-0.5), down.mul_(inner**-0.5)  # fmt: skip
    ids = torch.rand(TOKENS, count, device="cuda").topk(shape.top_k).indices
    return [t.requires_grad_() for t in leaves], bs.route(ids, count), normal(TOKENS, hidden)


def plain(
    x: torch.Tensor, s: torch.Tensor, routing: bs.Routing, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    h = torch._grouped_mm(x[routing.tokens], up.mT, routing.offsets)
    gate, other = h.chunk(2, -1)
    y = torch._grouped_mm(torch.nn.functional.silu(gate) * other, down.mT, routing.offsets)
    return (y[routing.slots] * s[..., None]).sum(1)


def milliseconds(step: Callable[[], Any], rounds: int) -> float:
    step()
    took = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end))
    return round(median(took), 2)


def measured(shape: Shape, rounds: int) -> dict[str, Any]:
    leaves, routing, grad = operands(shape)
    x, s, up, down = leaves
    calls: dict[str, Callable[[], torch.Tensor]] = {"bf16": lambda: plain(x, s, routing, up, down)}
    for name, recipe in RECIPES.items():
        calls[name] = lambda recipe=recipe: bs.nn.experts(x, s, routing, up, down, recipe=recipe)
    found: dict[str, Any] = {"forward": {}, "both": {}, "peak_gib": {}, "error": {}}
    want = calls["bf16"]().detach()
    for name, call in calls.items():

        def step(call: Callable[[], torch.Tensor] = call) -> None:
            for t in leaves:
                t.grad = None
            call().backward(grad)

        got = call().detach()
        found["error"][name] = round(float((got - want).norm() / want.norm()), 4)
        with torch.no_grad():
            found["forward"][name] = milliseconds(call, rounds)
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        found["both"][name] = milliseconds(step, rounds)
        found["peak_gib"][name] = round((torch.cuda.max_memory_allocated() - start) / 2**30, 2)
        if name != "bf16":
            with bs.reuse_weights():
                found["both"][f"{name}, reused"] = milliseconds(step, rounds)
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for name, shape in SHAPES.items():
        if args.only in (None, name):
            rows.append({"name": name, "shape": shape, **measured(shape, args.rounds)})
            print(rows[-1], flush=True)
    result = {"device": torch.cuda.get_device_name(), "tokens": TOKENS, "layers": rows}
    args.file.write_text(json_lines(result))


if __name__ == "__main__":
    main()
