"""Layers of experts, as models have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["SHAPES", "TOKENS", "Shape"]

TOKENS = 16384


class Shape(NamedTuple):
    """A layer of a model, and how many tokens it is given."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    tokens: int = TOKENS

    @property
    def pairs(self) -> int:
        return self.tokens * self.top_k


#: By the models that have them.
SHAPES: Mapping[str, Shape] = {
    "Qwen3-MoE": Shape(2048, 768, 128, 8),
    "Mixtral": Shape(4096, 14336, 8, 2),
    "DeepSeek-V3": Shape(7168, 2048, 256, 8),
}
