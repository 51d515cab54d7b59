"""Bring a recipe to a model: by swapping its layers, or for the length of a ``with`` block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .linear import Linear, linear
from .recipe import Recipe

__all__ = ["autocast", "convert"]

FilterFn = Callable[[torch.nn.Module, str], bool]


def convert(
    model: torch.nn.Module, recipe: Recipe, filter_fn: FilterFn | None = None
) -> torch.nn.Module:
    """Swap every torch.nn.Linear of ``model`` in place for :class:`blockscale.nn.Linear`.

    Args:
        recipe: for all of them.
        filter_fn: ``(module, name) -> bool``, which of them; all by default. Output layers and
            routers are usually left alone.

    Parameters are shared, not copied, so an optimizer made before stays valid, and hooks stay.
    Returns the model (a new module only where ``model`` itself is the layer). Subclasses of
    torch.nn.Linear are left alone. Raises TypeError for a recipe that is none and ValueError where
    no layer was swapped.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe: got {type(recipe).__name__}; expected blockscale.Recipe(...)")
    swapped: dict[torch.nn.Module, torch.nn.Module] = {}
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and (filter_fn is None or filter_fn(module, name)):
            swapped[module] = _from_linear(module, recipe)
    if not swapped:
        raise ValueError(
            "model: has no torch.nn.Linear that filter_fn accepts, nothing was converted"
        )
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children skips repetitions
            if child in swapped:
                setattr(parent, name, swapped[child])
    return swapped.get(model, model)


def _from_linear(module: torch.nn.Module, recipe: Recipe) -> Linear:
    new = Linear.__new__(Linear)
    new.__dict__ = dict(module.__dict__)  # parameters, hooks, training flag
    new.recipe = recipe
    return new


class autocast(TorchFunctionMode):
    """``with autocast(recipe): ...``: torch.nn.functional.linear multiplies as ``recipe`` says.

    For models that cannot be changed. Layers made by :func:`convert` keep their own recipe. It
    composes with torch.autocast, which decides the dtype of the output.
    """

    def __init__(self, recipe: Recipe) -> None:
        if not isinstance(recipe, Recipe):
            raise TypeError(f"recipe: got {type(recipe).__name__}; expected blockscale.Recipe(...)")
        super().__init__()
        self.recipe = recipe

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            return linear(*_linear_arguments(*args, **kwargs), recipe=self.recipe)
        return func(*args, **kwargs)


def _linear_arguments(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return input, weight, bias
