"""Experts of transformers, by our products: modules that its ``use_experts_implementation`` marks.

They hold ``gate_up_proj`` and ``down_proj`` as stacks of matrices, say by attributes how these lie,
and are called with tokens, and the experts and weights of each.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..routing import Routing, combine, route
from .experts import experts
from .group_checks import check_recipe_of_groups
from .grouped import grouped_linear
from .hf_activation import activation_of
from .recipe import Recipe
from .reuse import ForgetsWeights
from .unscripted import Unscripted

__all__ = ["Experts", "is_experts", "register_experts"]

_NAME = "blockscale"
_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts", "down_proj")


class Experts(ForgetsWeights, Unscripted, torch.nn.Module):
    """Experts of transformers with block-scaled products; made by :func:`blockscale.convert`."""

    recipe: Recipe

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return _run(self, hidden_states, top_k_index, top_k_weights, self.recipe)

    def find_activation(self) -> None:
        """Find the activation now: the first forward may be captured in a CUDA graph."""
        activation_of(self, next(self.parameters()).device)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}".removeprefix(", ")


def is_experts(module: torch.nn.Module) -> bool:
    """Whether it is what transformers marks so; that is not imported."""
    return all(hasattr(module, name) for name in _MARKS)


def register_experts(recipe: Recipe = Recipe()) -> None:  # noqa: B008 - a frozen value
    """Make ``experts_implementation="blockscale"`` known to transformers.

    >>> bs.nn.register_experts(bs.Recipe("fp8_block"))

    Then ``AutoModelForCausalLM.from_config(config, experts_implementation="blockscale")``.
    Experts of such models multiply as ``recipe`` says; those that :func:`blockscale.convert`
    changed, as theirs does, whatever the implementation is called. A model's own code is not
    changed. Registering again changes the recipe of all.

    Raises ImportError where transformers is not installed, or has no such implementations.
    """
    check_recipe_of_groups(recipe)
    try:
        functions: Any = import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    except (ImportError, AttributeError) as why:
        raise ImportError(
            "register_experts: transformers, of version 5 or later, is not installed; "
            "blockscale.convert changes experts without it"
        ) from why

    def forward(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return _run(module, hidden, index, weights, recipe)

    functions.register(_NAME, forward)


def _run(module: Any, x: Tensor, index: Tensor, weights: Tensor, recipe: Recipe) -> Tensor:
    """What the module's experts give each token."""
    routing = route(index, module.num_experts)
    activation = activation_of(module, x.device)
    if activation is None:
        return _composed(module, x, weights, routing, recipe)
    return experts(
        x,
        weights,
        routing,
        module.gate_up_proj,
        module.down_proj,
        recipe=recipe,
        activation=activation,
        up_bias=module.gate_up_proj_bias if module.has_bias else None,
        down_bias=module.down_proj_bias if module.has_bias else None,
        transposed=module.is_transposed,
    )


def _composed(module: Any, x: Tensor, weights: Tensor, routing: Routing, recipe: Recipe) -> Tensor:
    """One step after another, each with a backward of its own: whatever is between the products."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    rows = x[routing.tokens]
    h = _linear(module, name, rows, routing, recipe)
    h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    y = _linear(module, "down_proj", h, routing, recipe)
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y)
    return combine(y, routing.slots, weights)


def _linear(module: Any, name: str, x: Tensor, routing: Routing, recipe: Recipe) -> Tensor:
    weight = getattr(module, name)
    if module.is_transposed:
        weight = weight.mT.contiguous()
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    return grouped_linear(x, weight, routing.offsets, bias, recipe=recipe)
