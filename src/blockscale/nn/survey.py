"""Which layers of a model are to be changed, and why the others are not."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch.nn.parameter import is_lazy

from .exclude import default_exclusions
from .kinds import Kind, kind_of, unknown
from .parametrized import parameters_of
from .recipe import Recipe
from .report import ConversionReport, Entry, grouped, matrices

__all__ = [
    "FilterFn",
    "Layer",
    "by_override",
    "check_filter",
    "check_lazy",
    "check_model",
    "entry_of",
    "nothing_was",
    "product_parameters",
    "reasons",
    "report_on",
    "survey",
    "weights_of",
]

_REASONS, _NAMES = 5, 3  # in a message

FilterFn = Callable[[torch.nn.Module, str], bool]


class Layer(NamedTuple):
    """A layer that is to be changed."""

    name: str
    module: torch.nn.Module
    kind: Kind


def survey(
    model: torch.nn.Module,
    filter_fn: FilterFn | None,
    done: tuple[type, ...],
    obstacle: Callable[[Kind, torch.nn.Module], str],
    recipe: Recipe,
) -> tuple[list[Layer], list[Entry]]:
    """Layers to be changed, and modules with matrices of their own that stay, and why.

    Args:
        filter_fn: see :func:`convert`.
        done: types of layers that defaults do not exclude, as they were changed before.
        obstacle: why a layer of a kind cannot be changed; "" if it can.
        recipe: layers that it has an override for are not excluded by defaults, either.

    Raises ValueError for an override that no layer has.
    """
    why_not = default_exclusions(model)
    attention = [m for m in model.modules() if isinstance(m, torch.nn.MultiheadAttention)]
    parts = {module.out_proj for module in attention}  # whose forward is never called
    layers, left = [], []
    for name, module in model.named_modules():
        if module in parts or not weights_of(module):
            continue
        kind = kind_of(module)
        if kind is None:
            why = (why_not(module, name) if filter_fn is None else "") or unknown(module)
        elif isinstance(kind, str):
            why = kind
        else:
            why = obstacle(kind, module)
            pattern = recipe.pattern_of(name)
            if not why and filter_fn is not None:
                why = "" if filter_fn(module, name) else "refused by filter_fn"
            elif not why and pattern is None and not isinstance(module, done):
                why = why_not(module, name)
            if not why and recipe.of(name) is None:
                why = f"left alone by the recipe, for {pattern!r}"
            if not why:
                layers.append(Layer(name, module, kind))
                continue
        left.append(entry_of(name, module, why))
    _check_overrides(recipe, layers, left)
    return layers, left


def _check_overrides(recipe: Recipe, layers: list[Layer], left: list[Entry]) -> None:
    """ValueError for a pattern that says nothing of any layer."""
    used = {recipe.pattern_of(layer.name) for layer in layers}
    for pattern, override in dict(recipe.overrides).items():
        stay = [entry for entry in left if recipe.pattern_of(entry.name) == pattern]
        if pattern in used or (override is None and stay):
            continue
        taken = [layer.name for layer in layers if fnmatchcase(layer.name, pattern)]
        why = f"those that it matches stay: {reasons(stay)}" if stay else "it matches none"
        if taken:
            first = recipe.pattern_of(taken[0])
            why = f"as {first!r} before it takes {taken[0]}: put {pattern!r} before {first!r}"
        names = ", ".join(repr(layer.name) for layer in layers[:_NAMES]) or "none"
        raise ValueError(
            f"recipe: override {pattern!r} is of no layer that can be changed, {why}. Such layers "
            f"are {names}{', ...' if len(layers) > _NAMES else ''}; the first pattern that matches "
            "a layer's name counts"
        )


def by_override(recipe: Recipe, name: str) -> str:
    """How a layer is changed that the recipe has an override for; "" of others."""
    pattern = recipe.pattern_of(name)
    return "" if pattern is None else f"by {recipe.of(name)}, for {pattern!r}"


def weights_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters of a module, where one is a matrix or has no shape yet; with those of the output
    projection, which belongs to attention."""
    own = parameters_of(module)
    if not any(is_lazy(p) or p.dim() > 1 for p in own):
        return []
    if isinstance(module, torch.nn.MultiheadAttention):
        own += parameters_of(module.out_proj)
    return own


def entry_of(name: str, module: torch.nn.Module, why: str = "") -> Entry:
    """Of a module with matrices of its own."""
    sizes = {id(p): p.numel() for p in weights_of(module) if not is_lazy(p)}
    return Entry(name, type(module).__name__, sum(sizes.values()), why, sizes)


def check_model(model: object) -> None:
    """TypeError for what has no layers that can be changed."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "model: is compiled by torch.jit, its layers cannot be changed any more; change the "
            "module that it was made from"
        )
    if isinstance(model, torch.nn.Module):
        return
    remedy = (
        "; load a state_dict into one by load_state_dict first"
        if isinstance(model, Mapping)
        else ""
    )
    raise TypeError(
        f"model: got {getattr(model, '__name__', type(model).__name__)}; expected a "
        f"torch.nn.Module, whose layers are changed in place{remedy}"
    )


def check_filter(filter_fn: object) -> None:
    """TypeError unless it is None or can be called with a module and its name."""
    if filter_fn is None:
        return
    given = type(filter_fn).__name__
    if callable(filter_fn):
        try:
            signature = inspect.signature(filter_fn)
        except ValueError:  # of what is written in C
            return
        try:
            signature.bind(None, "")
        except TypeError:
            given = f"a function of {signature}"
        else:
            return
    raise TypeError(f"filter_fn: got {given}; expected a function of (module, name) -> bool")


def check_lazy(name: str, module: torch.nn.Module) -> None:
    """ValueError where its parameters have no shape yet."""
    if any(is_lazy(p) for p in module._parameters.values() if p is not None):
        raise ValueError(
            f"model: {name or 'it'} is a {type(module).__name__} without a shape yet; run one "
            "batch through the model first, or leave the layer out by filter_fn"
        )


def report_on(
    model: torch.nn.Module, layers: list[Layer], entries: list[Entry], left: list[Entry]
) -> ConversionReport:
    """What was done to ``layers``, with the share of parameters."""
    embeddings = torch.nn.Embedding | torch.nn.EmbeddingBag
    products = matrices(m for m in model.modules() if not isinstance(m, embeddings))
    return ConversionReport(
        entries,
        left,
        product_parameters([module for _, module, _ in layers]),
        sum(p.numel() for p in products.values()),
    )


def product_parameters(layers: list[torch.nn.Module]) -> int:
    """How many parameters the matrices of layers have."""
    attention = [m for m in layers if isinstance(m, torch.nn.MultiheadAttention)]
    held = matrices([*layers, *(m.out_proj for m in attention)])
    return sum(p.numel() for p in held.values())


def nothing_was(changed: str, left: list[Entry]) -> ValueError:
    """The error where no layer could be ``changed``, with the reasons."""
    why = (
        f"no layer could be: {reasons(left)}"
        if left
        else "it has no torch.nn.Linear and no other layer with matrices"
    )
    return ValueError(f"model: nothing was {changed}, as {why}")


def reasons(left: list[Entry]) -> str:
    """A few of them, for a message; those of most modules first."""
    counts = Counter(entry.why for entry in left)
    by_count = sorted(left, key=lambda entry: -counts[entry.why])
    return ". ".join(grouped(by_count)[:_REASONS])
