"""A small GPT over bytes: RMSNorm, rotary positions, causal attention, GELU, or experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn import MoE, Router

__all__ = ["GPT", "VOCABULARY", "Mixture", "in_block", "mixture", "mixtures"]

VOCABULARY = 256

#: Experts of a block of a width.
Mixture = Callable[[int], MoE]

#: Queries, keys and values (batch, heads, time, size), and what is to come, to the values attended.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class GPT(nn.Module):
    """Logits (batch, time, 256) in fp32 of the next byte from int64 tokens (batch, time).

    Parameters and the residual stream are fp32. Run it under ``torch.autocast`` with bfloat16: what
    enters each linear layer, and each gradient that comes back to it, is then bfloat16.
    ``fused_attention``: by torch's scaled_dot_product_attention, as a GPU wants it. ``mixture``:
    makes the experts of a block, instead of its perceptron.
    """

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        context: int,
        fused_attention: bool = False,
        mixture: Mixture | None = None,
    ) -> None:
        super().__init__()
        attend = _fused if fused_attention else _written_out
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, attend, mixture) for _ in range(layers))
        self.norm = Norm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.rotary: Tensor
        self.future: Tensor
        self.register_buffer("rotary", _rotary(context, width // heads), persistent=False)
        future = torch.ones(context, context, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # what a block adds to the residual stream is small at first
                residual = name.endswith(("out.weight", "down.weight", "down_proj"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        time = tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.rotary[:, :time], self.future[:time, :time])
        return self.head(self.norm(x)).float()


class Block(nn.Module):
    """Attention, then a two-layer perceptron or experts, each added to the residual stream."""

    def __init__(
        self, width: int, heads: int, attend: Attend, mixture: Mixture | None = None
    ) -> None:
        super().__init__()
        self.head_size, self.attend = width // heads, attend
        self.attention_norm, self.mlp_norm = Norm(width), Norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.moe = None if mixture is None else mixture(width)
        if mixture is None:
            self.up = nn.Linear(width, 4 * width, bias=False)
            self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, rotary: Tensor, future: Tensor) -> Tensor:
        x = x + self._attention(self.attention_norm(x), rotary, future)
        y = self.mlp_norm(x)
        return x + (self.down(F.gelu(self.up(y))) if self.moe is None else self.moe(y))

    def _attention(self, x: Tensor, rotary: Tensor, future: Tensor) -> Tensor:
        # of ranks each has some heads, and x may be some of the tokens
        y = self.qkv(x).unflatten(-1, (3, -1, self.head_size))
        q, k, v = y.permute(2, 0, 3, 1, 4)
        y = self.attend(_turn(q, rotary), _turn(k, rotary), v, future)
        return self.out(y.transpose(1, 2).flatten(2))


class Norm(nn.Module):
    """RMSNorm of the fp32 residual stream, handed on in bfloat16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight).to(torch.bfloat16)


def _fused(q: Tensor, k: Tensor, v: Tensor, future: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _written_out(q: Tensor, k: Tensor, v: Tensor, future: Tensor) -> Tensor:
    """On a CPU and at the size of ``blockscale train`` there twice as fast as the fused one."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


def _rotary(context: int, size: int) -> Tensor:
    """Cosines and sines of the angles, (2, context, size / 2) bfloat16."""
    frequency = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angle = torch.arange(context)[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin())).to(torch.bfloat16)


def _turn(x: Tensor, rotary: Tensor) -> Tensor:
    cosine, sine = rotary
    a, b = x.chunk(2, -1)
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), -1)


def mixture(width: int, *, size: int, experts: int, top_k: int) -> MoE:
    """Of so many experts, each of which is ``size`` wide inside."""
    return MoE(width, size, experts, Router(top_k=top_k), recipe=None)


def mixtures(model: nn.Module) -> Iterator[MoE]:
    """The experts of all blocks."""
    return (module for module in model.modules() if isinstance(module, MoE))


def in_block(module: nn.Module, name: str) -> bool:
    """Filter for :func:`blockscale.convert`: the products of the blocks, not embedding and head."""
    return name.startswith("blocks.")
