"""A Llama, or a mixture of experts, with the names of transformers, so that its plans are those of
the real ones: ``python -m examples.ranks.train --transformers`` takes that instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockscale as bs

__all__ = ["SIZES", "Llama", "LlamaConfig"]


@dataclass(frozen=True)
class LlamaConfig:
    """Fields of transformers' LlamaConfig, and of MixtralConfig where there are experts."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    num_local_experts: int = 0
    num_experts_per_tok: int = 2

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


SIZES = {
    "tiny": LlamaConfig(512, 1024, 2, 16, 8, 512),
    "tiny-moe": LlamaConfig(512, 256, 2, 16, 8, 512, num_local_experts=8),
    "1b": LlamaConfig(2048, 8192, 16, 32, 8, 128_256),
    "8b": LlamaConfig(4096, 14_336, 32, 32, 8, 128_256),
}


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim, wide = config.head_dim, config.hidden_size
        kv = config.num_key_value_heads * config.head_dim
        self.q_proj, self.o_proj = (nn.Linear(wide, wide, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(wide, kv, bias=False) for _ in range(2))

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        made = (layer(hidden_states) for layer in (self.q_proj, self.k_proj, self.v_proj))
        # this rank has some of the heads, all of the sequence
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in made)
        q, k = (rotated(x, *position_embeddings) for x in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        wide, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(wide, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, wide, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def perceptron(config: LlamaConfig) -> nn.Module:
    if not config.num_local_experts:
        return MLP(config)
    sizes = config.hidden_size, config.intermediate_size, config.num_local_experts
    return bs.nn.MoE(*sizes, bs.nn.Router(top_k=config.num_experts_per_tok), recipe=None)


class DecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        norms = (nn.RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2))
        self.input_layernorm, self.post_attention_layernorm = norms
        self.self_attn, self.mlp = Attention(config), perceptron(config)

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        x = hidden_states + self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
        )
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(input_ids)
        positions = self.positions(input_ids.shape[1], x)
        for layer in self.layers:
            x = layer(x, position_embeddings=positions)
        return self.norm(x)

    def positions(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the whole sequence."""
        half = torch.arange(0, self.config.head_dim, 2, device=like.device)
        rates = self.config.rope_theta ** (-half / self.config.head_dim)
        angles = torch.outer(torch.arange(length, device=like.device), rates).repeat(1, 2)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor) -> Any:
        return self.lm_head(self.model(input_ids))
