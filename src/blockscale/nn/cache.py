"""Quantized weights, kept until their high-precision master changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from .forms import Forms, quantize_forms

__all__ = ["clear_weight_cache", "quantized_weight"]

_cache: WeakIdKeyDictionary = WeakIdKeyDictionary()


def quantized_weight(
    weight: Tensor, format: str, scale_rounding: str | None, *, rows: bool, columns: bool
) -> Forms:
    """``weight`` (N, K) quantized, from the cache if it is the same as last time.

    At least the forms that are asked for are there. Those that were not made before are made from
    one read.

    A change is seen through the tensor's version counter (every in-place operation), its storage
    and optimizer steps (fused ones leave the counter alone). Writing through ``weight.data``
    bypasses the counter, here as in autograd: call :func:`clear_weight_cache` after that. Quantized
    each time: in traced code; weights made in inference mode (they have no counter); and in the
    capture of a CUDA graph, whose replays are to see what the weight is then.
    """
    if torch.compiler.is_compiling() or weight.is_inference() or _is_captured(weight):
        return quantize_forms(weight, format, scale_rounding, rows=rows, columns=columns)
    state = (weight._version, weight.data_ptr(), weight.dtype)
    kept = _cache.get(weight)
    if kept is None or kept[0] != state:
        kept = _cache[weight] = (state, {})
    key = (format, scale_rounding, _stream(weight))
    have = kept[1].get(key, Forms())
    made = quantize_forms(
        weight,
        format,
        scale_rounding,
        rows=rows and have.rows is None,
        columns=columns and have.columns is None,
    )
    forms = kept[1][key] = Forms(
        have.rows if made.rows is None else made.rows,
        have.columns if made.columns is None else made.columns,
    )
    return forms


def _is_captured(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _stream(weight: Tensor) -> int:
    """The stream that work is queued on: another one does not wait for what was made here."""
    return torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0


def clear_weight_cache() -> None:
    """Forget every quantized weight; needed after writing to a weight through ``.data``."""
    _cache.clear()


def _forget_stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _cache.pop(parameter, None)


register_optimizer_step_post_hook(_forget_stepped)
