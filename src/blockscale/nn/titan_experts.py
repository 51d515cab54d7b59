"""Experts of torchtitan, by our products: stacks ``w1`` (gate), ``w2`` (down) and ``w3`` (up),
called with rows that are in the order of experts, and how many rows each has."""

from __future__ import annotations

import copy
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

__all__ = ["TitanExperts", "recognize"]

_WEIGHTS = ("w1", "w2", "w3")
_NEAR = 0.01  # of each number: three roundings to bf16 have at most 0.6 %
_UNBIASED = 1e-3  # of their mean: roundings cancel, a factor does not


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


def recognize(module: torch.nn.Module, definer: type) -> bool | str:
    """Whether it is called and shaped as torchtitan's are, of which many have a copy, and has their
    values: ``w1`` and ``w3`` (experts, I, H), ``w2`` (experts, H, I), SwiGLU. Or why it is left
    alone, though it is called and shaped so."""
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
    return alike and (_why_not_swiglu(module, definer) or True)


def _why_not_swiglu(module: Any, definer: Any) -> str:
    """What its own forward says of small matrices in the place of its own; empty: SwiGLU.

    Each row of a matrix takes one number as it is, so that every result is the activation of two
    numbers, whatever types the products have.
    """
    generator = torch.Generator().manual_seed(0)
    x = _trial(generator)
    small = {
        "w1": _choices((2, 32, 16), generator),
        "w2": _choices((2, 16, 32), generator),
        "w3": _choices((2, 32, 16), generator),
    }
    twin = copy.copy(module)
    parameters = {name: torch.nn.Parameter(each) for name, each in small.items()}
    twin.__dict__ = {**module.__dict__, "_parameters": parameters, "num_experts": 2}
    half = len(x) // 2
    try:
        with torch.no_grad():
            found = definer.forward(twin, x, torch.tensor([half, half])).float()
    except Exception as error:  # whatever its forward raises: it says it
        return f"as experts of torchtitan, but its forward cannot be tried: {error}"
    want = experts(
        x,
        None,
        torch.tensor([half, 2 * half], dtype=torch.int32),
        small["w3"],
        small["w2"],
        gate=small["w1"],
        recipe=None,
    )
    if not found.isfinite().all():
        return "as experts of torchtitan, but its forward overflows where bf16 does not"
    if found.shape == want.shape and torch.allclose(found, want, rtol=_NEAR, atol=1e-6):
        there = want.abs() > 1e-3
        if abs((found[there] / want[there]).mean() - 1) <= _UNBIASED:
            return ""
    return "as experts of torchtitan, with another activation than SwiGLU"


def _trial(generator: torch.Generator) -> Tensor:
    """Numbers of bf16: some as models have them, others far beyond, where any limit shows."""
    near = 4 * torch.randn(256, 16, generator=generator)
    far = near.sign() * 2 ** (60 * torch.rand(near.shape, generator=generator))
    which = torch.rand(near.shape, generator=generator) < 0.5
    return torch.where(which, near, far).bfloat16().float()


def _choices(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Matrices whose rows have a one each."""
    which = torch.randint(shape[2], shape[:2], generator=generator)
    return torch.nn.functional.one_hot(which, shape[2]).float()


def _local(x: Any) -> Tensor:
    """A DTensor's own part: ranks have sharded experts, and been given rows of theirs."""
    local: Tensor = x.to_local() if is_dtensor(x) else x
    return local
