"""Experts of torchtitan, by our products: stacks ``w1`` (gate), ``w2`` (down) and ``w3`` (up),
called with rows that are in the order of experts, and how many rows each has."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ..tensor_checks import check_is_tensor
from ..watching import is_dtensor
from .experts import experts
from .recipe import Recipe
from .reuse import ForgetsWeights
from .unscripted import Unscripted

__all__ = ["TitanExperts", "titan_experts"]

_WEIGHTS = ("w1", "w2", "w3")


class TitanExperts(ForgetsWeights, Unscripted, torch.nn.Module):
    """GroupedExperts of torchtitan with block-scaled products; made by
    :func:`blockscale.convert`."""

    recipe: Recipe

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        check_is_tensor("num_tokens_per_expert", num_tokens_per_expert)
        gate, down, up = (_local(getattr(self, name)) for name in _WEIGHTS)
        ends = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        y = experts(_local(x), None, ends, up, down, gate=gate, recipe=self.recipe)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}".removeprefix(", ")


def titan_experts(module: torch.nn.Module, definer: type) -> bool | str:
    """Whether it is called and shaped as torchtitan's are, of which many have a copy: ``w1`` and
    ``w3`` (experts, I, H), ``w2`` (experts, H, I); or why it cannot be told."""
    found = [getattr(module, name, None) for name in _WEIGHTS]
    if not all(isinstance(each, Tensor) and each.dim() == 3 for each in found):
        return False
    w1, w2, w3 = (tuple(each.shape) for each in found if each is not None)
    names = list(inspect.signature(definer.forward).parameters)  # type: ignore[attr-defined]
    alike = (
        names[2:] == ["num_tokens_per_expert"]
        and w1 == w3 == (w2[0], w2[2], w2[1])
        and {name for name, _ in module.named_parameters(recurse=False)} == set(_WEIGHTS)
    )
    if alike and w1[1] == w1[2]:
        return (
            f"as experts of torchtitan, whose matrices are square, {w1}: whether they are "
            "transposed cannot be told; call blockscale.nn.experts with gate="
        )
    return alike


def _local(x: Any) -> Tensor:
    """A DTensor's own part: ranks have sharded experts, and been given rows of theirs."""
    local: Tensor = x.to_local() if is_dtensor(x) else x
    return local
