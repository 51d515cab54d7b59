"""Quantized weights, kept until their high-precision master changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..quantize import quantize
from ..tensor import ScaledTensor

__all__ = ["clear_weight_cache", "quantized_weight"]

_cache: WeakIdKeyDictionary = WeakIdKeyDictionary()


def quantized_weight(
    weight: Tensor, axis: int, format: str, scale_rounding: str | None
) -> ScaledTensor:
    """``weight`` (N, K) quantized along ``axis``, from the cache if it is the same as last time.

    A change is seen through the tensor's version counter (every in-place operation), its storage
    and optimizer steps (fused ones leave the counter alone). Writing through ``weight.data``
    bypasses the counter, here as in autograd: call :func:`clear_weight_cache` after that. Traced
    code, and weights made in inference mode (they have no counter), are quantized each time.
    """
    if torch.compiler.is_compiling() or weight.is_inference():
        return quantize(weight, format, axis, scale_rounding=scale_rounding, pad=True)
    state = (weight._version, weight.data_ptr(), weight.dtype)
    kept = _cache.get(weight)
    if kept is None or kept[0] != state:
        kept = _cache[weight] = (state, {})
    key = (axis, format, scale_rounding)
    if key not in kept[1]:
        kept[1][key] = quantize(weight, format, axis, scale_rounding=scale_rounding, pad=True)
    return kept[1][key]


def clear_weight_cache() -> None:
    """Forget every quantized weight; needed after writing to a weight through ``.data``."""
    _cache.clear()


def _forget_stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _cache.pop(parameter, None)


register_optimizer_step_post_hook(_forget_stepped)
