"""Products of the linear layers of well-known models: what the choice of kernels is held to.

N and K are of the fused projections (q, k and v; gate and up), M is the number of tokens at once.
Sizes are those of the published configurations; those of 8 GPUs have a layer's N (qkv, gate and
up) or K (o, down) split among them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LLM_SHAPES", "LlmShape"]


@dataclass(frozen=True, slots=True)
class LlmShape:
    model: str
    layer: str
    m: int
    n: int
    k: int


# model -> layer -> (N, K, token counts)
_LAYERS: dict[str, dict[str, tuple[int, int, tuple[int, ...]]]] = {
    "Llama 3 8B": {
        "qkv": (6144, 4096, (512, 4096)),
        "o": (4096, 4096, (128, 2048)),
        "gate+up": (28672, 4096, (1024, 8192)),
        "down": (4096, 14336, (256, 4096)),
    },
    "Llama 3 70B": {
        "qkv": (10240, 8192, (64, 2048)),
        "o": (8192, 8192, (512, 4096)),
        "gate+up": (57344, 8192, (128, 4096)),
        "down": (8192, 28672, (128, 2048)),
    },
    "Llama 3 405B, 8 GPUs": {
        "qkv": (2304, 16384, (128, 4096)),
        "o": (16384, 2048, (2048,)),
        "gate+up": (13312, 16384, (1024,)),
        "down": (16384, 6656, (256, 4096)),
    },
    "DeepSeek-V3": {
        "q and kv, down": (2112, 7168, (128, 4096)),
        "kv, down": (576, 7168, (4096,)),
        "q, up": (24576, 1536, (1024,)),
        "kv, up": (32768, 512, (4096,)),
        "o": (7168, 16384, (128, 4096)),
        "shared expert gate+up": (4096, 7168, (4096,)),
        "shared expert down": (7168, 2048, (4096,)),
    },
    "Qwen3 32B": {
        "qkv": (10240, 5120, (1024,)),
        "o": (5120, 8192, (256, 4096)),
        "gate+up": (51200, 5120, (2048,)),
        "down": (5120, 25600, (512,)),
    },
    "Mixtral 8x22B": {
        "qkv": (8192, 6144, (2048,)),
        "expert gate+up": (32768, 6144, (512,)),
        "expert down": (6144, 16384, (64, 512)),
    },
}

LLM_SHAPES = tuple(
    LlmShape(model, layer, m, n, k)
    for model, layers in _LAYERS.items()
    for layer, (n, k, tokens) in layers.items()
    for m in tokens
)
