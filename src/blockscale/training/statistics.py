"""What quantization does to the real tensors of a model in training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..hadamard import transformed
from ..measure import error_sums
from ..nn import GatedExperts, Linear, Recipe
from ..nn.forms import padded
from ..nn.operand import Operand
from ..ops import global_scale
from ..quantize import quantize
from ..reference import bounds
from ..routing import Routing, route
from ..tensor import ScaledTensor
from .ranks import Ranks

__all__ = ["ROLES", "Statistics"]

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

    def add(self, other: _Sums) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


class Statistics:
    """Saturation and signal-to-noise ratio of activations, weights and gradients.

    ``with statistics.watch(model): loss.backward()`` looks at each tensor that the quantized layers
    multiply, along the axes they use; of experts at the rows of each, at its matrices and at the
    gradient of its result, not at what lies between its two products. The ratio is that of a
    tensor's energy to the energy of its error, averaged (as noise to signal) over all tensors seen.
    It changes nothing in the model.

    Of ``ranks`` each looks at the tensors of its part of a batch, of those that share a part or the
    weights the first one: at whole tensors. All have the sums of all.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks or Ranks(torch.device("cpu"))
        self._sums = {role: _Sums() for role in ROLES}

    @contextmanager
    def watch(self, model: torch.nn.Module) -> Iterator[None]:
        """Look at one forward and backward pass."""
        before, self._sums = self._sums, {role: _Sums() for role in ROLES}
        hooks = []
        for module in model.modules():
            if isinstance(module, Linear):
                self._add_weight(module)
                hooks.append(module.register_forward_hook(self._after_forward))
            elif isinstance(module, GatedExperts) and module.recipe is not None:
                self._add_stacks(module)
                hooks.append(module.register_forward_hook(self._after_experts, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        seen, self._sums = self._ranks.gathered(self._sums), before
        for role, sums in self._sums.items():
            for each in seen:
                sums.add(each[role])

    def _add_weight(self, layer: Linear) -> None:
        """Before ranks gather it as products read it."""
        weight = self._ranks.whole(layer.weight)
        if self._ranks.rank == 0:
            self._add("weights", weight, layer.recipe)

    def _add_stacks(self, layer: Any) -> None:
        for stack in map(self._ranks.whole, (layer.gate_up_proj, layer.down_proj)):
            if self._ranks.rank == 0:
                self._add_parts("weights", stack, list(stack), layer.recipe)

    def _after_forward(self, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._add_seen(layer, "activations", inputs[0])
        if output.requires_grad:
            output.register_hook(lambda grad: self._add_seen(layer, "gradients", grad))

    def _add_seen(self, layer: Linear, role: str, x: Tensor) -> None:
        whole = self._ranks.seen(layer, role, x.detach())
        if whole is not None:
            self._add(role, whole, layer.recipe)

    def _after_experts(
        self, layer: Any, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor
    ) -> None:
        given = dict(zip(("x", "weights", "routing"), inputs, strict=False)) | named
        self._add_rows(layer, "activations", given["x"], given["routing"])
        if output.requires_grad:
            output.register_hook(
                lambda grad: self._add_rows(layer, "gradients", grad, given["routing"])
            )

    def _add_rows(self, layer: Any, role: str, x: Tensor, routing: Routing) -> None:
        """Those of each expert."""
        chosen = torch.searchsorted(routing.offsets, routing.slots.int(), right=True)
        whole, experts = (self._ranks.seen(layer, role, each) for each in (x.detach(), chosen))
        if whole is None or experts is None:
            return
        routing = route(experts, len(routing.offsets))
        rows = whole[routing.tokens.long()]
        groups = bounds(routing.offsets, len(rows))
        self._add_parts(role, rows, [rows[start:end] for start, end in groups], layer.recipe)

    def _add_parts(self, role: str, x: Tensor, parts: list[Tensor], recipe: Recipe) -> None:
        """Parts of ``x``, which has one global scale, if the format has one."""
        format = recipe.format_of(role)
        scalar = None
        if format.has_global_scale and x.numel():
            scalar = global_scale(x.detach().contiguous(), format.name)
        for part in parts:
            self._add(role, part, recipe, scalar)

    def _add(self, role: str, x: Tensor, recipe: Recipe, scalar: Tensor | None = None) -> None:
        """``scalar``: the global scale, if it is not that of ``x``."""
        x = x.detach().reshape(-1, x.shape[-1]).contiguous()
        if not x.any():
            return  # what a zero gradient loses says nothing
        sums, operand = self._sums[role], recipe.operand(role)
        for used, axis, product in _USES:
            if used != role or product in recipe.high_precision:
                continue
            rows, q = _quantized(x if axis == -1 else x.mT.contiguous(), operand, axis, scalar)
            found = error_sums(rows, q)
            sums.tensors += 1
            sums.elements += x.numel()
            sums.saturated += found.saturated
            sums.noise_to_signal += math.nan if found.nonfinite else found.noise / found.signal

    def state(self) -> dict[str, Any]:
        """What was seen, for ``restore``."""
        return {role: asdict(sums) for role, sums in self._sums.items()}

    def restore(self, found: dict[str, Any]) -> None:
        self._sums = {role: _Sums(**sums) for role, sums in found.items()}

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


def _quantized(
    rows: Tensor, operand: Operand, axis: int, scalar: Tensor | None
) -> tuple[Tensor, ScaledTensor]:
    """Rows as a form along ``axis`` has them, transformed if it is, and quantized as that is, but
    by signs and random numbers of no step."""
    how: Any = {"scale_rounding": operand.scale_rounding, "pad": True, "global_scale": scalar}
    form = operand.rows if axis == -1 else operand.columns
    if form.hadamard is not None:
        rows = padded(rows, -1, operand.contraction(axis, rows.shape[-1]))
        how |= {"hadamard": form.hadamard, "global_scale": None}
    how |= {"square": form.square, "scaling": form.scaling, "seed": 0 if form.is_random else None}
    q = quantize(rows, operand.format, **how)
    return rows if form.hadamard is None else transformed(rows, form.hadamard, -1), q


def _decibel(noise_to_signal: float) -> float:
    return -10 * math.log10(max(noise_to_signal, 1e-30))  # 300 dB: nothing was lost
