"""Layers of experts on a GPU: what ``blockscale bench moe`` measures, in less time, and the memory
that they take.

    PYTHONPATH=src python3 benchmarks/gpu_moe.py FILE.json [--only NAME] [--recipe fp8_block]

``logits`` are those of a router, three ways. ``route`` is beside torch's sort and what follows it,
each in a CUDA graph. Memory is what torch allocates at most during forward and backward, and what
is kept between them.
Where transformers is installed, a block of it that is converted is timed beside ``bs.nn.MoE``.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_tiles import json_lines

import blockscale as bs
from blockscale import reference
from blockscale.bench import contest as contests
from blockscale.bench.host import measure_host, quantize_calls
from blockscale.bench.moe import AT_ONCE, RECIPES, Layer, bf16, layer_calls, make_layer, ours
from blockscale.bench.moe import contests as of_layers
from blockscale.bench.moe_shapes import SHAPES, Shape
from blockscale.bench.moe_stages import measure_stages
from blockscale.bench.timing import Timer
from blockscale.nn.gate import WidenedProduct


class Short(Timer):
    """Few repeats: a layer takes milliseconds."""

    def microseconds(self, call: Any, repeats: int = 30) -> float:
        return super().microseconds(call, min(repeats, 6))


def memory(layer: Layer, recipe: str) -> dict[str, float]:
    """Of a token: bytes kept, and at most; and how far results are from bf16's."""
    tokens, run = len(layer.x), lambda: ours(layer, RECIPES[recipe])
    want = bf16(layer).detach()
    run().backward(layer.grad)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    y = run()
    kept = torch.cuda.memory_allocated() - start - y.nbytes
    y.backward(layer.grad)
    peak = torch.cuda.max_memory_allocated() - start
    error = float((y.detach() - want).norm() / want.norm())
    return {"kept": kept / tokens, "peak": peak / tokens, "error": round(error, 4)}


def measured(name: str, shape: Shape, recipes: list[str], timer: Timer) -> dict[str, Any]:
    found = [
        asdict(row)
        for one in of_layers(recipes, {name: shape})
        for row in contests.contest(one, timer)
    ]
    layer = make_layer(shape)
    kept = {recipe: memory(layer, recipe) for recipe in recipes}
    for each in layer.leaves:
        each.grad = None
    steps = [
        asdict(stage)
        for recipe in recipes
        for stage in measure_stages(name, layer, shape, recipe, RECIPES[recipe], timer)
    ]
    return {"rows": found, "memory": kept, "stages": steps}


def blocks(timer: Timer) -> dict[str, float]:
    """Forward and backward of a converted block of Qwen3-MoE, and of ours of its sizes, whose
    weights have the layout of transformers', too."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    shape, how = SHAPES["Qwen3-MoE"], {"device": "cuda", "dtype": torch.bfloat16}
    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )
    recipe = bs.Recipe("fp8_block")
    theirs = Qwen3MoeSparseMoeBlock(config).to(**how)
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    router = bs.nn.Router(top_k=shape.top_k, norm_topk_prob=config.norm_topk_prob)
    sizes = shape.hidden, shape.intermediate, shape.experts
    mine = bs.nn.MoE(*sizes, router, recipe=recipe, **how)
    found = {}
    x, grad = (torch.randn(1, shape.tokens, shape.hidden, **how) for _ in range(2))
    x.requires_grad_()

    def step(block: torch.nn.Module) -> None:
        for each in (x, *block.parameters()):
            each.grad = None
        y = block(x)
        (y[0] if isinstance(y, tuple) else y).backward(grad)

    for name, block in (("bs.nn.MoE", mine), ("converted", bs.convert(theirs, recipe))):
        found[name] = timer.microseconds(lambda block=block: step(block))
    return found


def logits(timer: Timer) -> dict[str, float]:
    """Forward and backward of a router's logits: of fp32 copies; in bf16; and as ``bs.nn.MoE`` has
    them, of bf16 values in fp32 sums."""
    shape = SHAPES["Qwen3-MoE"]
    x, weight = (
        torch.randn(rows, shape.hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for rows in (shape.tokens, shape.experts)
    )
    grad = torch.randn(shape.tokens, shape.experts, device="cuda")
    linear = torch.nn.functional.linear
    runs = {
        "fp32": lambda: linear(x.float(), weight.float()),
        "bf16": lambda: linear(x, weight).float(),
        "bf16, fp32 sums": lambda: WidenedProduct.apply(x, weight),
    }
    found = {}
    for name, run in runs.items():
        found[name] = timer.microseconds(lambda run=run: run().backward(grad))
    return found


#: Tokens, top-k and experts of routings; the last have many chunks.
ROUTINGS = ((64, 8, 128), (16384, 8, 128), (16384, 8, 256), (16384, 2, 8), (70000, 8, 1023))


def routings() -> list[dict[str, float]]:
    """Microseconds of each, of ours and of torch's operations."""
    found = []
    for tokens, top_k, experts in ROUTINGS:
        ids = torch.randint(experts, (tokens, top_k), device="cuda")
        row: dict[str, float] = {"tokens": tokens, "top_k": top_k, "experts": experts}
        for name, run in (("blockscale", bs.route), ("torch", reference.route)):
            run(ids, experts)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(10):
                    run(ids, experts)
            row[name] = Timer().microseconds(graph.replay) / 10
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", choices=SHAPES)
    parser.add_argument("--recipe", default="fp8_block,mxfp8")
    args = parser.parse_args()
    recipes, timer = args.recipe.split(","), Short()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "layers": {}}
    calls = layer_calls(recipes[0]) | quantize_calls()
    result["host"] = [asdict(call) for call in measure_host(calls, next(iter(calls)), AT_ONCE)]
    result["route"], result["logits"] = routings(), logits(timer)
    if find_spec("transformers"):
        result["blocks"] = blocks(timer)
    for name, shape in SHAPES.items():
        if args.only in (None, name):
            result["layers"][name] = measured(name, shape, recipes, timer)
            args.file.write_text(json_lines(result))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
