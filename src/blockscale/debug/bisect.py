"""Which products of a model cost the most, found by halves: those that cost nothing together are
not tried one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..nn.conv1d import Conv1D
from ..nn.linear import Linear
from ..nn.recipe import PRODUCTS, Recipe, check_training_recipe
from ..nn.seeds import number_of
from ..watching import is_dtensor

__all__ = ["Bisection", "Cost", "bisect"]

_LAYERS = (Linear, Conv1D)
_STEP = 0.01  # of the loss, by which the exact step lowers it in first order


class Cost(NamedTuple):
    """What products cost that are quantized alone, all others being exact.

    Attributes:
        format: of the recipe: what a Recipe's ``format`` is, or its repr where more is said.
        products: names of layers and their products.
        forward: by how much the loss of the batch is higher.
        step: by how much it is higher after a step along the gradient, evaluated exactly.
    """

    format: str
    products: tuple[tuple[str, str], ...]
    forward: float
    step: float

    @property
    def total(self) -> float:
        return abs(self.forward) + abs(self.step)


@dataclass(frozen=True)
class Bisection:
    """What :func:`bisect` found, the most costly first.

    Attributes:
        loss: of the batch, exact; ``lowered``: by how much an exact step lowers it.
        whole: what all products cost together, one for each recipe.
        costs: of products by themselves, and of groups that were not divided.
    """

    loss: float
    lowered: float
    whole: list[Cost]
    costs: list[Cost]

    def __str__(self) -> str:
        lines = [f"loss {self.loss:.6g}, which an exact step lowers by {self.lowered:.3g}"]
        for cost in (*self.whole, *self.costs):
            lines.append(
                f"{cost.format:12} forward {cost.forward:+.3g}, step {cost.step:+.3g}: "
                f"{_named(cost.products, all_of=cost in self.whole)}"
            )
        return "\n".join(lines)


def bisect(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    recipes: Sequence[Recipe] | None = None,
    share: float = 0.1,
) -> Bisection:
    """Find the products of converted linear layers that cost the most of a batch's loss.

    >>> model = bs.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), bs.Recipe("nvfp4"))
    >>> found = bs.debug.bisect(model, torch.randn(32, 64), lambda y: y.square().mean())
    >>> found.costs[0].products
    (('0', 'fprop'),)

    All products are exact but a few, whose cost is taken; groups that cost more than a share of the
    whole are halved, down to one product. A product of the forward changes the loss; those of the
    backward change the gradient, and with it the loss after a step, which is as long as lowers the
    exact loss by a percent. The model, its gradients and random numbers are as before.

    Args:
        batch: what the model is called with: a tensor, a tuple of arguments, or a dict of them by
            name.
        loss: of what the model returns, a scalar; None: the model returns it, or it is ``.loss``.
        recipes: for all layers, one after the other; None: the layers' own.
        share: of the whole cost; groups below it stay together.

    Raises ValueError where the model has no converted linear layer whose weight is trained, where
    ranks share its parameters or a weight has ``main_grad``, and where the loss is no finite scalar
    or ``share`` no number from 0 to 1; TypeError for a recipe that is none.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share: got {share}; expected a number from 0 to 1")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, _LAYERS)}
    layers = {name: m for name, m in layers.items() if m.weight.requires_grad}
    if not layers:
        raise ValueError(
            "model: has no converted linear layer whose weight is trained; call "
            "blockscale.convert(model, recipe) before"
        )
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            raise ValueError(f"model: ranks share {name}; pass a model that one process has whole")
        if getattr(parameter, "main_grad", None) is not None:
            raise ValueError(
                f"model: {name} has main_grad, which each trial would add to; delete it, or pass a "
                "copy of the model"
            )
    own: dict[str, Recipe] = {name: layer.recipe for name, layer in layers.items()}
    if isinstance(recipes, Recipe):
        raise TypeError(f"recipes: got {recipes}; expected a list of recipes: [{recipes}]")
    for recipe in recipes or ():
        check_training_recipe(recipe)
    trial = _Trial(model, batch, loss, layers)
    with _restored(model, layers):
        exact = trial.measure({}, None)
        whole: list[Cost] = []
        costs: list[Cost] = []
        for given in [dict.fromkeys(own, r) for r in recipes] if recipes else [own]:
            each = _halved(trial, given, exact, share)
            whole.append(next(each))
            costs += each
    costs.sort(key=lambda cost: -cost.total)
    return Bisection(exact.loss, exact.loss - exact.after, whole, costs)


class _Losses(NamedTuple):
    """The loss of the batch, and the exact one after a step of this ``rate``."""

    loss: float
    after: float
    rate: float


@dataclass(frozen=True)
class _Trial:
    model: nn.Module
    batch: Any
    loss: Callable[[Any], Tensor] | None
    layers: Mapping[str, Any]

    def measure(self, recipes: Mapping[str, Recipe], rate: float | None) -> _Losses:
        """With layers multiplying as ``recipes`` say, and others exactly."""
        self._set(recipes)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        loss = self._loss()
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        moved = [(p, g) for p, g in zip(parameters, grads, strict=True) if g is not None]
        if rate is None:
            square = sum(float(g.double().square().sum()) for _, g in moved)
            rate = _STEP * abs(float(loss.detach())) / square if square else 0.0
        before = [p.detach().clone() for p, _ in moved]
        with torch.no_grad():
            for p, g in moved:
                p.sub_(g, alpha=rate)
        self._set({})
        with torch.no_grad():
            after = float(self._loss())
            for (p, _), values in zip(moved, before, strict=True):
                p.copy_(values)
        return _Losses(float(loss.detach()), after, rate)

    def _set(self, recipes: Mapping[str, Recipe]) -> None:
        for name, layer in self.layers.items():
            layer.recipe = recipe = recipes.get(name, Recipe(high_precision=PRODUCTS))
            if recipe.is_random and not layer.has_steps:
                layer.set_rounding(recipe, number_of(name))
            if layer.has_steps:
                layer.set_steps(0)  # the same random numbers each time

    def _loss(self) -> Tensor:
        """The same random numbers each time."""
        devices = {p.device for p in self.model.parameters() if p.is_cuda}
        with torch.random.fork_rng([*devices]):
            torch.manual_seed(0)
            out = _called(self.model, self.batch)
        found = self.loss(out) if self.loss is not None else getattr(out, "loss", out)
        if not isinstance(found, Tensor) or found.numel() != 1 or not bool(found.isfinite().all()):
            given = type(found).__name__
            if isinstance(found, Tensor):
                given = f"{found.item()}" if found.numel() == 1 else f"shape {tuple(found.shape)}"
            raise ValueError(
                f"loss: got {given}; expected a finite scalar: pass loss=, a function of what "
                "the model returns"
            )
        return found.reshape(())


def _halved(
    trial: _Trial, recipes: Mapping[str, Recipe], exact: _Losses, share: float
) -> Iterator[Cost]:
    """The cost of all products, then those of parts that were not divided."""
    products = [
        (name, product)
        for name, recipe in recipes.items()
        for product in PRODUCTS
        if product not in recipe.high_precision
    ]
    named = {re.sub(r"^Recipe\('(\w+)'\)$", r"\1", str(each)) for each in recipes.values()}
    format = named.pop() if len(named) == 1 else "as converted"

    def cost(some: Sequence[tuple[str, str]]) -> Cost:
        chosen: dict[str, set[str]] = {}
        for name, product in some:
            chosen.setdefault(name, set()).add(product)
        given = {
            name: replace(
                recipes[name], high_precision=tuple(p for p in PRODUCTS if p not in quantized)
            )
            for name, quantized in chosen.items()
        }
        found = trial.measure(given, exact.rate)
        return Cost(format, tuple(some), found.loss - exact.loss, found.after - exact.after)

    whole = cost(products)
    yield whole
    waiting = [whole]
    while waiting:
        group = waiting.pop()
        count = len(group.products)
        if count > 1 and (group is whole or group.total > share * whole.total):
            halves = group.products[: count // 2], group.products[count // 2 :]
            waiting += [cost(half) for half in reversed(halves)]
        elif group is not whole or count == 1:
            yield group


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


@contextmanager
def _restored(model: nn.Module, layers: Mapping[str, Any]) -> Iterator[None]:
    """Recipes are in the end what they were, and buffers, which a forward may write to."""
    recipes = {name: layer.recipe for name, layer in layers.items()}
    stepping = {name for name, layer in layers.items() if layer.has_steps}
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        for name, layer in layers.items():
            layer.recipe = recipes[name]
            if name not in stepping:
                layer.set_rounding(None, 0)
        with torch.no_grad():
            for buffer, values in buffers:
                buffer.copy_(values)


def _named(products: Sequence[tuple[str, str]], *, all_of: bool) -> str:
    if all_of and len(products) > 1:
        return f"all {len(products)} products"
    shown = ", ".join(f"{name} {product}" for name, product in products[:3])
    return shown + (f" and {len(products) - 3} more" if len(products) > 3 else "")
