"""Experts of transformers, by our products: modules that its ``use_experts_implementation`` marks.

They hold ``gate_up_proj`` and ``down_proj`` as stacks of matrices, say by attributes how these lie,
and are called with tokens, and the experts and weights of each.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

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

__all__ = [
    "Experts",
    "Steps",
    "find_activation",
    "is_experts",
    "register_experts",
    "run_experts",
    "stack_names",
]

_NAME = "blockscale"
_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts", "down_proj")


class Experts(ForgetsWeights, Unscripted, torch.nn.Module):
    """Experts of transformers with block-scaled products; made by :func:`blockscale.convert`."""

    recipe: Recipe

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return run_experts(self, hidden_states, top_k_index, top_k_weights, self.recipe, _PLAIN)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}".removeprefix(", ")


def is_experts(module: torch.nn.Module) -> bool:
    """Whether it is what transformers marks so; that is not imported."""
    return all(hasattr(module, name) for name in _MARKS)


def find_activation(module: torch.nn.Module) -> None:
    """Find the activation now: the first forward may be captured in a CUDA graph."""
    activation_of(module, next(module.parameters()).device)


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
        return run_experts(module, hidden, index, weights, recipe, _PLAIN)

    functions.register(_NAME, forward)


def stack_names(module: Any) -> tuple[str, str]:
    """The parameters that its products multiply by."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


class Steps(NamedTuple):
    """What experts are computed by, of matrices that are held in high precision, or otherwise.

    Attributes:
        experts: :func:`experts`, or a function that is called alike: all at once.
        linear: the product of grouped rows by a stack, of x, the stack, offsets, bias, a recipe and
            whether the stack is transposed.
    """

    experts: Callable[..., Tensor]
    linear: Callable[[Tensor, Any, Tensor, Tensor | None, Recipe, bool], Tensor]


def run_experts(
    module: Any, x: Tensor, index: Tensor, weights: Tensor, recipe: Recipe, steps: Steps
) -> Tensor:
    """What the module's experts give each token."""
    routing = route(index, module.num_experts)
    activation = activation_of(module, x.device)
    if activation is None:
        return _composed(module, x, weights, routing, recipe, steps)
    return steps.experts(
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


def _composed(
    module: Any, x: Tensor, weights: Tensor, routing: Routing, recipe: Recipe, steps: Steps
) -> Tensor:
    """One step after another, each with a backward of its own: whatever is between the products."""

    def product(name: str, rows: Tensor) -> Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        given = getattr(module, name), routing.offsets, bias, recipe, module.is_transposed
        return steps.linear(rows, *given)

    up, down = stack_names(module)
    h = product(up, x[routing.tokens])
    h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    y = product(down, h)
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y)
    return combine(y, routing.slots, weights)


def _linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    transposed: bool,
) -> Tensor:
    if transposed:
        weight = weight.mT.contiguous()
    return grouped_linear(x, weight, offsets, bias, recipe=recipe)


_PLAIN = Steps(experts, _linear)
