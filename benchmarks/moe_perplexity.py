"""A language model of experts, trained as ``blockscale train --moe`` does, then run with its
experts in ``bs.distributed.MegaMoE``, in every format.

    PYTHONPATH=src python3 benchmarks/moe_perplexity.py FILE.json [--device cuda] [--steps 150]

Perplexity of bytes that were held out, against the same model in bf16. Of NVFP4 activations with
the default global scales, and with those of the largest values that the first sequences had
(``amax``: that of tokens, and that of what the second product reads, of each layer).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import blockscale as bs
from blockscale import training
from blockscale.distributed import MegaMoE
from blockscale.formats import get_format
from blockscale.training import run as runs
from blockscale.training.gpt import mixtures

#: Formats of weights and of activations.
PAIRS = (
    ("fp8_128x128", "fp8_1x128"),
    ("mxfp8", "mxfp8"),
    ("mxfp4", "mxfp8"),
    ("nvfp4", "nvfp4"),
    ("nvfp4", "fp8_1x128"),
)
CALIBRATED = 16  # sequences


def trained(settings: training.Settings, text: training.Text) -> tuple[nn.Module, training.Corpus]:
    made = []

    def kept(*args: Any) -> nn.Module:
        made.append(model(*args))
        return made[-1]

    model = runs._model
    corpus = training.Corpus(text, settings.context)
    with patch.object(runs, "_model", kept):
        training.train("bf16", 0, corpus, settings, lambda p: print(p, flush=True))
    return made[0].eval(), corpus


@torch.no_grad()
def perplexity(model: nn.Module, corpus: training.Corpus, settings: training.Settings) -> float:
    return math.exp(runs._validate(model, corpus, settings, runs.Ranks(corpus.train.device))[0])


@contextmanager
def in_format(model: nn.Module, weights: str, activations: str, scales: Any) -> Iterator[None]:
    """Experts are others inside. ``scales``: of each layer, or None for the default."""
    layers = list(mixtures(model))
    before = [each.experts for each in layers]
    for i, each in enumerate(layers):
        held = each.experts
        up, down = (_quantized(w.detach(), weights) for w in (held.gate_up_proj, held.down_proj))
        given = (
            {} if scales is None else dict(zip(("a1_scale", "a2_scale"), scales[i], strict=True))
        )
        tokens = 1 << 16
        each.experts = MegaMoE(
            up, down, tokens=tokens, topk=each.router.top_k, activations=activations, **given
        )
    yield
    for each, held in zip(layers, before, strict=True):
        each.experts = held


def _quantized(w: Tensor, format: str) -> Any:
    """A stack; of NVFP4 each matrix with a scale of its own."""
    if not get_format(format).has_global_scale:
        return bs.quantize(w, format, pad=True)
    return torch.stack([bs.quantize(m, format, pad=True) for m in w])


@torch.no_grad()
def amax_scales(
    model: nn.Module, corpus: training.Corpus, settings: training.Settings
) -> list[tuple[Tensor, Tensor]]:
    """Global scales of each layer's tokens, and of what its second product reads."""
    found: list[Any] = []
    handles = [
        each.experts.register_forward_pre_hook(lambda module, args: found.append((module, args)))
        for each in mixtures(model)
    ]
    starts = corpus.validation_starts(settings.validation_sequences)[:CALIBRATED]
    runs._loss(model, *corpus.sequences(corpus.validation, starts))
    for each in handles:
        each.remove()
    scales = []
    for module, (x, _, routing) in found:
        rows, begin, largest = x[routing.tokens.long()].float(), 0, 0.0
        for expert, end in enumerate(routing.offsets.tolist()):
            h = rows[begin:end] @ module.gate_up_proj[expert].float().mT
            gate, up = h.chunk(2, -1)
            if begin < end:
                largest = max(largest, float((nn.functional.silu(gate) * up).abs().max()))
            begin = end
        values = x.float().abs().max(), torch.tensor(largest, device=x.device)
        scales.append(tuple(value / (448 * 6) for value in values))
    return scales


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    given = {} if args.steps is None else {"steps": args.steps}
    settings = training.Settings.on(args.device, True, **given)
    text = training.choose_text(None, args.device)
    model, corpus = trained(settings, text)
    rows = [
        {
            "weights": "bf16",
            "activations": "bf16",
            "perplexity": perplexity(model, corpus, settings),
        }
    ]
    exact = amax_scales(model, corpus, settings)
    for weights, activations in PAIRS:
        choices = {"": None}
        if activations == "nvfp4":
            choices = {"default": None, "amax": exact}
        for name, scales in choices.items():
            with in_format(model, weights, activations, scales):
                found = perplexity(model, corpus, settings)
            rows.append(
                {
                    "weights": weights,
                    "activations": activations,
                    "scales": name,
                    "perplexity": found,
                }
            )
            print(rows[-1], flush=True)
    result = {
        "device": args.device,
        "steps": settings.steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "text": text.source,
        "rows": rows,
    }
    args.file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
