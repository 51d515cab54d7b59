"""What formats of gradients and roundings of scales cost a step of training: where it shows.

    python benchmarks/ablation_steps.py OUT.json

Losses of whole runs differ more by chance than by recipe. Here a small GPT that bf16 trains is
looked at along its way: by ``blockscale.debug.bisect``, the loss of a batch in each recipe over the
exact one, and that after a step along the gradient which the recipe gives. All recipes have the
same batches, so that their differences are pairs.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import blockscale as bs
from blockscale.training import Corpus
from blockscale.training.gpt import GPT, VOCABULARY, in_block
from blockscale.training.recipes import RECIPES
from blockscale.training.sources import choose_text

NAMES = ("mxfp8", "mxfp8_e5m2_grad", "mxfp8_floor", "mxfp8_even")
WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 192, 3, 3, 128, 8
POINTS = (10, 100, 1000)  # steps of training after which it is looked at
EXACT = bs.Recipe("mxfp8", high_precision=bs.nn.recipe.PRODUCTS)
BATCHES = 32  # that are looked at


class Losses(nn.Module):
    """The loss of a batch under autocast, as it is trained."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(inputs)
        return cross_entropy(logits.view(-1, VOCABULARY), targets.flatten())


#: Which layers are quantized.
LAYERS_OF: dict[str, Callable[[nn.Module, str], bool]] = {
    "blocks": in_block,
    "blocks and head": lambda module, name: name == "head" or in_block(module, name),
}

Batch = tuple[Tensor, Tensor]


def trained() -> Iterator[tuple[int, Losses, list[Batch]]]:
    """The model after each of ``POINTS`` steps, and the batches to look at."""
    torch.manual_seed(0)
    losses = Losses(GPT(WIDTH, LAYERS, HEADS, CONTEXT))
    optimizer = torch.optim.AdamW(losses.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    corpus = Corpus(choose_text(None, "cpu"), CONTEXT, "cpu")
    looked_at = list(corpus.batches(BATCHES, BATCH, 1))
    for step, starts in enumerate(corpus.batches(max(POINTS), BATCH, 0), 1):
        losses(*corpus.sequences(corpus.train, starts)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in POINTS:
            yield step, losses, [corpus.sequences(corpus.train, each) for each in looked_at]


def measure(losses: Losses, batches: list[Batch], layers: str) -> dict[str, Any]:
    """Of each recipe of these ``LAYERS_OF``, in percent: by how much the loss is higher, how much
    is lost of what an exact step gains, and the error of the gradient over its length; with the
    mean difference to mxfp8 and the standard error of that."""
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in NAMES}
    for batch in batches:
        convert(losses, RECIPES["mxfp8"], layers)
        each = bs.debug.bisect(losses, batch, recipes=[RECIPES[name] for name in NAMES], share=1)
        exact = gradient(losses, batch, EXACT, layers)
        for name, cost in zip(NAMES, each.whole, strict=True):
            error = (gradient(losses, batch, RECIPES[name], layers) - exact).norm() / exact.norm()
            found[name].append(
                (
                    100 * cost.forward / each.loss,
                    100 * cost.step / each.lowered,
                    100 * float(error),
                )
            )
    bs.convert(losses, None)
    rows = {}
    for name in NAMES:
        row: dict[str, float] = {}
        for i, what in enumerate(("forward", "step", "gradient_error")):
            over = [a[i] - b[i] for a, b in zip(found[name], found["mxfp8"], strict=True)]
            row[what] = fmean(each[i] for each in found[name])
            row[f"{what}_over_mxfp8"] = fmean(over)
            row[f"{what}_standard_error"] = stdev(over) / len(over) ** 0.5
        rows[name] = row
        print(name, {key: f"{value:.4f}" for key, value in row.items()}, flush=True)
    return rows


def convert(losses: Losses, recipe: bs.Recipe, layers: str) -> None:
    chosen = LAYERS_OF[layers]
    bs.convert(losses, recipe, lambda module, name: chosen(module, name.removeprefix("model.")))


def gradient(losses: Losses, batch: Batch, recipe: bs.Recipe, layers: str) -> Tensor:
    """Of the weights of the blocks, as a vector."""
    convert(losses, recipe, layers)
    weights = [p for p in losses.model.blocks.parameters() if p.dim() > 1]
    found = torch.autograd.grad(losses(*batch), weights)
    return torch.cat([each.flatten().double() for each in found])


def main() -> None:
    points = []
    for step, losses, batches in trained():
        print("after", step, "steps", flush=True)
        for layers in LAYERS_OF:
            print(layers, flush=True)
            found = measure(losses, batches, layers)
            points.append({"steps": step, "layers": layers, "percent": found})
    about = {
        "device": platform.processor() or "CPU",
        "torch": torch.__version__,
        "model": {"width": WIDTH, "layers": LAYERS, "heads": HEADS, "context": CONTEXT},
        "batch": BATCH,
        "batches": BATCHES,
    }
    Path(sys.argv[1]).write_text(json.dumps({**about, "points": points}, indent=1) + "\n")


if __name__ == "__main__":
    main()
