"""What the file of most tests holds, and what a command said."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["QUANTIZED", "Ran", "tensors"]


def tensors() -> dict[str, Tensor]:
    """A little of everything."""
    g = torch.Generator().manual_seed(0)
    return {
        "embed_tokens.weight": torch.randn(96, 128, generator=g),
        "layers.0.attn.weight": torch.randn(260, 256, generator=g),
        "layers.0.attn.bias": torch.cat([torch.randn(256, generator=g), torch.ones(4)]),
        "layers.0.experts.weight": torch.randn(3, 130, 128, generator=g).bfloat16(),
        "layers.0.mlp.weight": torch.randn(64, 384, generator=g).half(),
        "layers.0.odd.weight": torch.randn(32, 100, generator=g),
        "norm.weight": torch.randn(2, 128, generator=g),
        "position_ids": torch.arange(512).reshape(4, 128),
        "mask": torch.ones(3, dtype=torch.bool),
        "nothing": torch.empty(0, 128),
    }


QUANTIZED = ("layers.0.attn.weight", "layers.0.experts.weight", "layers.0.mlp.weight")


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str
