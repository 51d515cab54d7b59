"""Layers of vLLM as modules that multiply by quantized weights, and the op of a linear one.

The op takes tensors that torch knows, and names: vLLM's compiler records it as one node, alike for
layers of one shape, and its caches hold nothing of ours. Experts are inside of an op of vLLM's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..nn.gated import SWIGLU, GatedActivation
from ..nn.layer_ops import recipe_of
from ..nn.quantized import has_input_scale, quantized_linear
from ..nn.quantized_experts import quantized_experts
from ..nn.recipe import Recipe
from ..ops.operation import operation
from ..routing import route
from .weight_module import WeightModule, frozen, of_parts
from .weights import Experts, Weight

__all__ = ["ServedExperts", "ServedLinear"]


# --- linear layers --------------------------------------------------------------------------------


class ServedLinear(WeightModule):
    """A weight (N, K) that stays as it is, and ``x @ weight.T + bias``.

    >>> layer = ServedLinear(Weight(bs.quantize(torch.randn(256, 512), "mxfp8"), None), recipe)

    NVFP4 activations are quantized with the checkpoint's global scale, others as they come.
    """

    def __init__(self, weight: Weight, recipe: Recipe) -> None:
        super().__init__(weight.q)
        self.recipe = recipe
        self.input_scale = frozen(weight.input_scale if has_input_scale(recipe) else None)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        stored = self.codes, self.scales, self.global_scale, self.input_scale
        how = self.format_name, self.layout_name, self.shape, self.recipe.text
        return served_linear(x, *stored, bias, *how)


def _fake(x: Tensor, shape: list[int]) -> Tensor:
    return x.new_empty([*x.shape[:-1], shape[0]])


@operation(_fake)
def served_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    input_scale: Tensor | None,
    bias: Tensor | None,
    format: str,
    layout: str,
    shape: list[int],
    recipe: str,
) -> Tensor:
    """``x @ weight.T + bias`` by a weight as its parts, quantized as the text of a recipe says."""
    weight = of_parts(codes, scales, global_scale, format, layout, shape)
    how = recipe_of(recipe)
    return quantized_linear(x, weight, bias, recipe=how, input_scale=input_scale)


# --- experts --------------------------------------------------------------------------------------


class ServedExperts(torch.nn.Module):
    """Stacks (E, 2I, H), or two (E, I, H), and (E, H, I), and what tokens get of their experts.

    >>> layer = ServedExperts(assemble_experts(kind, up, down, "mlp.experts"), recipe)
    >>> y = layer(x, topk_weights, topk_ids)

    With biases (E, 2I) and (E, H) where they are given. NVFP4 activations are quantized with the
    largest of the experts' global scales.
    """

    def __init__(
        self,
        experts: Experts,
        recipe: Recipe,
        activation: GatedActivation = SWIGLU,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.recipe, self.activation = recipe, activation
        self.up_bias, self.down_bias = frozen(up_bias), frozen(down_bias)
        self.up, self.down = WeightModule(experts.up), WeightModule(experts.down)
        self.gate = None if experts.gate is None else WeightModule(experts.gate)
        static = has_input_scale(recipe)
        self.up_input_scale = frozen(experts.up_input_scale if static else None)
        self.down_input_scale = frozen(experts.down_input_scale if static else None)

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        routing = route(topk_ids, self.up.shape[0])
        up, down = self.up.weight, self.down.weight
        gate = None if self.gate is None else self.gate.weight
        return quantized_experts(
            *(x, topk_weights, routing, up, down),
            recipe=self.recipe,
            gate=gate,
            activation=self.activation,
            up_bias=self.up_bias,
            down_bias=self.down_bias,
            up_input_scale=self.up_input_scale,
            down_input_scale=self.down_input_scale,
        )
