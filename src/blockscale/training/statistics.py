"""What quantization does to the real tensors of a model in training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..nn import Linear, Recipe
from ..quantize import quantize
from ..tensor import ScaledTensor

__all__ = ["ROLES", "Statistics", "limits"]

ROLES = ("activations", "weights", "gradients")

#: Every tensor of a linear layer, the axis it is blocked along and the product that reads it so.
_USES = (
    ("activations", -1, "fprop"),
    ("activations", -2, "wgrad"),
    ("weights", -1, "fprop"),
    ("weights", -2, "dgrad"),
    ("gradients", -1, "dgrad"),
    ("gradients", -2, "wgrad"),
)


@dataclass
class _Sums:
    tensors: int = 0
    elements: int = 0
    saturated: int = 0
    noise_to_signal: float = 0.0  # summed over tensors


class Statistics:
    """Saturation and signal-to-noise ratio of activations, weights and gradients.

    ``with statistics.watch(model): loss.backward()`` looks at each tensor that the quantized layers
    multiply, along the axes they use. The ratio is that of a tensor's energy to the energy of its
    error, averaged (as noise to signal) over all tensors seen. It changes nothing in the model.
    """

    def __init__(self) -> None:
        self._sums = {role: _Sums() for role in ROLES}

    @contextmanager
    def watch(self, model: torch.nn.Module) -> Iterator[None]:
        """Look at one forward and backward pass."""
        layers = [m for m in model.modules() if isinstance(m, Linear)]
        hooks = [layer.register_forward_hook(self._after_forward) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _after_forward(self, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        recipe = layer.recipe
        self._add("activations", inputs[0], recipe)
        self._add("weights", layer.weight, recipe)
        if output.requires_grad:
            output.register_hook(lambda grad: self._add("gradients", grad, recipe))

    def _add(self, role: str, x: Tensor, recipe: Recipe) -> None:
        x = x.detach().reshape(-1, x.shape[-1]).contiguous()
        sums, format = self._sums[role], recipe.format_of(role)
        for used, axis, product in _USES:
            if used != role or product in recipe.high_precision:
                continue
            q = quantize(x, format, axis, scale_rounding=recipe.scale_rounding, pad=True)
            exact = x.float()
            signal = exact.square().sum(dtype=torch.float64).item()
            if signal == 0:
                continue  # what a zero gradient loses says nothing
            noise = (q.dequantize(torch.float32) - exact).square().sum(dtype=torch.float64).item()
            sums.tensors += 1
            sums.elements += x.numel()
            sums.saturated += int((exact.abs() > limits(q)).sum())
            sums.noise_to_signal += noise / signal

    def summary(self) -> dict[str, dict[str, float]]:
        """By role: elements seen, saturated elements per million, SQNR in dB; no role if unseen."""
        return {
            role: {
                "elements": sums.elements,
                "saturated_per_million": 1e6 * sums.saturated / sums.elements,
                "sqnr_db": _decibel(sums.noise_to_signal / sums.tensors),
            }
            for role, sums in self._sums.items()
            if sums.tensors
        }


def limits(q: ScaledTensor) -> Tensor:
    """The largest magnitude that each element could have been given: ``element.max * scale``."""
    rows, columns = q.format.block if q.axis == -1 else q.format.block[::-1]
    scale = q.to_layout("compact").scale.float() * q.format.element.max
    if q.global_scale is not None:
        scale = scale * q.global_scale
    spread = scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return spread[..., : q.shape[-2], : q.shape[-1]]


def _decibel(noise_to_signal: float) -> float:
    return -10 * math.log10(max(noise_to_signal, 1e-30))  # 300 dB: nothing was lost
