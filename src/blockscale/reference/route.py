"""Which rows experts have: a stable sort."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["route"]


def route(experts: Tensor, num_experts: int) -> list[Tensor]:
    """Pairs of tokens and their ``experts`` (tokens, top_k), by expert and then by token: which
    pair each row is; the row of each pair, shaped as ``experts``; the end of each expert's rows;
    and the token of each row. Those of no expert come last.
    """
    ids = experts.flatten().clamp(-1, num_experts) % (num_experts + 1)  # of none: num_experts
    if num_experts < torch.iinfo(torch.int16).max:
        ids = ids.short()  # a radix sort's time is that of the bits of a key
    by_expert, pairs = torch.sort(ids, stable=True)
    rows = torch.arange(len(pairs), device=pairs.device)
    slots = torch.empty_like(pairs).scatter_(0, pairs, rows)
    every = torch.arange(num_experts, device=pairs.device, dtype=by_expert.dtype)
    offsets = torch.searchsorted(by_expert, every, right=True, out_int32=True)
    tokens = (pairs // max(experts.shape[1], 1)).int()
    return [pairs, slots.view(experts.shape), offsets, tokens]
