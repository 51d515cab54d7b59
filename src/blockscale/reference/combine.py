"""What tokens get of their experts."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["combine"]


def combine(
    y: Tensor, slots: Tensor, weights: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """The sum of each token's rows of ``y`` (R, H), which ``slots`` (tokens, top_k) name, times
    ``weights`` (tokens, top_k): (tokens, H).

    In fp32 (float64 of float64), from zero on, each product and each sum rounded, in the order of
    the slots, and rounded once to ``dtype``, which is that of ``y`` by default.
    """
    wide = torch.promote_types(y.dtype, torch.float32)
    total = y.new_zeros(slots.shape[0], y.shape[1], dtype=wide)
    for j in range(slots.shape[1]):
        row = y[slots[:, j]].to(wide)
        total = total + (row if weights is None else row * weights[:, j, None].to(wide))
    return total.to(dtype or y.dtype)
