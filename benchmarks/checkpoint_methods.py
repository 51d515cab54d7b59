"""What each way of quantizing weights costs a language model: SQNR, KL of logits, perplexity.

A small Llama is trained on text as bytes; then its linear layers are rounded in each way, and the
last tenth of the text is read with them. Activations stay in high precision: what is measured is
what happens to weights. GPTQ sees other sequences than those that are scored.

    python benchmarks/checkpoint_methods.py [--data FILE] [--steps 6000]

Writes benchmarks/results/checkpoint_methods.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import LlamaConfig, LlamaForCausalLM

import blockscale as bs
from blockscale.fused_names import fused_with
from blockscale.nn.exclude import default_exclusions
from blockscale.training.data import read_text

LENGTH, BATCH = 256, 16
#: Format -> ways to choose scales; each with elements to nearest, and by GPTQ.
METHODS = {
    "nvfp4": ("amax", "four_over_six", "search"),
    "mxfp4": ("amax",),
    "mxfp6_e2m3": ("amax",),
    "mxfp8": ("amax",),
    "fp8_128x128": ("amax",),
}
Model = LlamaForCausalLM


def sequences(text: bytes, device: torch.device) -> Tensor:
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
    return tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)


def trained(data: Tensor, steps: int, device: torch.device) -> Model:
    """In fp32, with bf16 products; AdamW, a cosine to zero."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.05)
    for step in range(steps):
        x = data[torch.randint(len(data), (BATCH,)).to(device)]
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        if step % 250 == 0:
            print(f"step {step}: {loss.item():.4f}", flush=True)
    return model.eval()


@torch.no_grad()
def logits(model: Model, data: Tensor) -> Tensor:
    return torch.cat([model(x).logits[:, :-1].float() for x in data.split(BATCH)]).flatten(0, 1)


def scores(model: Model, data: Tensor, wanted: Tensor) -> dict[str, float]:
    found = logits(model, data)
    loss = cross_entropy(found, data[:, 1:].flatten()).item()
    kl = kl_div(found.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="sum")
    return {"perplexity": math.exp(loss), "loss": loss, "kl": kl.item() / len(found)}


def rounded(model: Model, format: str, scaling: str) -> None:
    """Weights to nearest, with the global scales that servers need."""
    why_not = default_exclusions(model)
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not why_not(module, name)
    }
    scales = {
        name: bs.quantize(layer.weight, format, scaling=scaling).global_scale
        for name, layer in layers.items()
    }
    with torch.no_grad():
        for name, layer in layers.items():
            group = [scales[each] for each in fused_with(name) if each in layers]
            scale = None if scales[name] is None else torch.stack(group).amax()
            q = bs.quantize(layer.weight, format, scaling=scaling, global_scale=scale)
            layer.weight.copy_(q.dequantize())


def sqnr(model: Model, plain: Model) -> float:
    """In dB, of all weights that differ."""
    signal = noise = 0.0
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        if not torch.equal(a, b):
            signal += a.double().square().sum().item()
            noise += (a.double() - b.double()).square().sum().item()
    return 10 * math.log10(signal / noise)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--sequences", type=int, default=128, help="that GPTQ sees")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = read_text(given.data)
    train, validation = (sequences(part, device) for part in (text.train, text.validation))
    plain = trained(train, given.steps, device)
    batches = list(train[torch.randperm(len(train))[: given.sequences].to(device)].split(BATCH))
    wanted = logits(plain, validation)
    runs: list[dict[str, Any]] = [{"method": "high precision", **scores(plain, validation, wanted)}]
    print(runs[0], flush=True)

    def measure(method: str, change: Callable[[Model], Any], **about: str) -> None:
        model, start = copy.deepcopy(plain), time.perf_counter()
        change(model)
        seconds = time.perf_counter() - start
        found = {"sqnr_db": sqnr(model, plain), **scores(model, validation, wanted)}
        runs.append({**about, "method": method, "seconds": seconds, **found})
        print(runs[-1], flush=True)

    for format, scalings in METHODS.items():
        for scaling in scalings:
            about = {"format": format, "scaling": scaling}
            measure("nearest", lambda m, f=format, s=scaling: rounded(m, f, s), **about)
            for memory in (1, 4 << 30):
                turns = "gptq, a layer at a time" if memory == 1 else "gptq"
                measure(
                    turns,
                    lambda m, f=format, s=scaling, n=memory: bs.gptq(
                        m, batches, f, scaling=s, memory=n
                    ),
                    **about,
                )
    out = {
        "model": f"Llama of bytes, {sum(p.numel() for p in plain.parameters()):,} parameters",
        "data": text.source,
        "steps": given.steps,
        "tokens": given.steps * BATCH * LENGTH,
        "validation_tokens": len(wanted),
        "gptq_tokens": sum(each.numel() for each in batches),
        "torch": torch.__version__,
        "blockscale": bs.__version__,
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "runs": runs,
    }
    (given.out / "checkpoint_methods.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
