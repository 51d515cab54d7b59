"""Bring a recipe to a model, or take it away, by changing its layers."""

from __future__ import annotations

import torch

from ..tensor import ScaledTensor
from .attention import set_fast_paths
from .class_change import become, original, restore
from .group_checks import check_recipe_of_groups
from .hf_activation import forget_activation
from .hf_experts import Experts, find_activation
from .kinds import CONVERTED, GROUPED, OWN, QUANTIZED, Kind
from .names import plain_name
from .recipe import Recipe, check_training_recipe
from .report import ConversionReport, Entry, publish
from .seeds import Stepping, number_of
from .survey import (
    FilterFn,
    by_override,
    check_filter,
    check_lazy,
    check_model,
    entry_of,
    nothing_was,
    product_parameters,
    reasons,
    report_on,
    survey,
    weights_of,
)

__all__ = ["convert"]

_BEFORE = "_recipe_before"  # of layers that were made with one
_QUANTIZED = "holds a quantized weight and no other; load the high-precision one to convert it"


def convert(
    model: torch.nn.Module,
    recipe: Recipe | None,
    filter_fn: FilterFn | None = None,
    *,
    report: ConversionReport | None = None,
) -> torch.nn.Module:
    """Change linear layers and experts of ``model`` in place: they multiply as ``recipe`` says.

    >>> bs.convert(model, bs.Recipe("mxfp8"))
    >>> bs.convert(model, bs.Recipe("nvfp4"))  # the same layers by another recipe
    >>> bs.convert(model, None)  # back to what they were

    torch.nn.Linear becomes :class:`blockscale.nn.Linear`. torch.nn.MultiheadAttention (its
    projections) and Conv1D of transformers are converted, too, and subclasses of these three that
    have no ``forward`` of their own; also where torch.nn.utils.parametrize computes their weight,
    before the conversion or after. Experts are those of transformers, all that it marks by
    ``use_experts_implementation``, and GroupedExperts of torchtitan. A layer keeps its identity,
    parameters, hooks and buffers: an optimizer made before stays valid, isinstance sees what it
    saw. torch's fused paths for evaluation around converted layers are off; that needs the whole
    torch.nn.TransformerEncoder to be in ``model``.

    Args:
        recipe: for all of them, but for its overrides: layers that those name are converted as
            they say, or left alone, or made what they were. None makes all what they were.
        filter_fn: ``(module, name) -> bool``, asked of every layer that can be converted; what it
            says is done. Without it output heads (by name, by ``get_output_embeddings()``, or tied
            to an embedding), routers of experts, adapters and what is named as an embedding are
            left alone unless they are converted already: names in
            :data:`blockscale.nn.DEFAULT_EXCLUDE`.
        report: filled with what was converted, and what was not and why. The same is logged
            (logger "blockscale"): as a warning where less than half of the parameters of matrix
            products are in converted layers.

    Returns the model. Raises TypeError for a model, a recipe or a filter_fn that is none,
    ValueError where no layer can be converted (those whose weight is quantized already are for
    :func:`blockscale.quantize_`), and for lazy layers that have no shape yet.
    """
    check_model(model)
    check_filter(filter_fn)
    if recipe is None:
        return _convert_back(model, filter_fn, report)
    check_training_recipe(recipe, knows_names=True)
    layers, left = survey(model, filter_fn, CONVERTED, _obstacle, recipe)
    if not layers:
        raise nothing_was("converted", left)
    for name, module, kind in layers:
        check_lazy(name, module)
        _check_rounding(name, kind, recipe.of(name))
        if kind.converted in GROUPED:
            check_recipe_of_groups(recipe.of(name))
    entries = []
    for name, module, kind in layers:
        how = by_override(recipe, name)
        if isinstance(module, OWN):
            module.__dict__.setdefault(_BEFORE, module.recipe)
        elif isinstance(module, kind.converted):
            how = f"{how}, before by {module.recipe}".removeprefix(", ")
        else:
            become(module, kind.converted)
            if isinstance(module, Experts):
                find_activation(module)
        entries.append(entry_of(name, module, how))
        found = recipe.of(name)
        assert found is not None  # else it was left alone
        module.recipe = found  # type: ignore[assignment]
        if isinstance(module, Stepping):
            module.set_rounding(found, number_of(plain_name(name)))
    for name, module in model.named_modules():
        left_alone = recipe.of(name) is None and (filter_fn is None or filter_fn(module, name))
        if left_alone and _is_converted(module) and not _is_a_subclass(module):
            _restore(module)
    set_fast_paths(model, CONVERTED + QUANTIZED)
    publish(report_on(model, layers, entries, left), report)
    return model


def _check_rounding(name: str, kind: Kind, recipe: Recipe | None) -> None:
    """ValueError of stochastic rounding in a layer that counts no steps."""
    if recipe is not None and recipe.is_random and not issubclass(kind.converted, Stepping):
        raise ValueError(
            f"recipe: {name} is a {kind.converted.__name__}, which does not round stochastically "
            f"yet; give it another recipe: overrides={{{name!r}: blockscale.Recipe('nvfp4')}}, or "
            "None to leave it alone"
        )


def _obstacle(kind: Kind, module: torch.nn.Module) -> str:
    if isinstance(module, QUANTIZED):
        return _QUANTIZED
    if not any(isinstance(weight, ScaledTensor) for weight in weights_of(module)):
        return ""
    call = "call blockscale.quantize_ to multiply by it, or " if kind.quantized else ""
    return f"its weight is quantized already; {call}load the high-precision one to convert it"


def _is_converted(module: torch.nn.Module) -> bool:
    if isinstance(module, QUANTIZED):
        return False
    return _BEFORE in module.__dict__ if isinstance(module, OWN) else isinstance(module, CONVERTED)


def _is_a_subclass(module: torch.nn.Module) -> bool:
    """Whether its class, which is not ours, was made of a converted layer: it never was another."""
    return not isinstance(module, OWN) and issubclass(original(module), CONVERTED)


def _convert_back(
    model: torch.nn.Module, filter_fn: FilterFn | None, report: ConversionReport | None
) -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    others: list[torch.nn.Module] = []
    entries: list[Entry] = []
    left: list[Entry] = []
    for name, module in model.named_modules():
        why = ""
        if isinstance(module, QUANTIZED):
            why = _QUANTIZED
        elif not _is_converted(module):
            continue
        elif _is_a_subclass(module):
            why = "a subclass of a layer of blockscale"
        elif filter_fn is not None and not filter_fn(module, name):
            why = "refused by filter_fn"
        if why:
            left.append(entry_of(name, module, why))
            others.append(module)
        else:
            entries.append(entry_of(name, module, "back to what it was"))
            layers.append(module)
    if not layers:
        raise ValueError(
            "model: has no layer made by blockscale.convert that filter_fn accepts, nothing was "
            "converted back" + (f". Left alone: {reasons(left)}" if left else "")
        )
    for module in layers:
        _restore(module)
    set_fast_paths(model, CONVERTED + QUANTIZED)
    counts = product_parameters(layers), product_parameters(layers + others)
    publish(ConversionReport(entries, left, *counts), report, complain=False)
    return model


def _restore(module: torch.nn.Module) -> None:
    """Make a converted layer what it was."""
    if isinstance(module, OWN):
        module.recipe = module.__dict__.pop(_BEFORE)
        if isinstance(module, Stepping):
            module.set_rounding(module.recipe, 0)
        return
    if isinstance(module, Stepping):
        module.set_rounding(None, 0)
    restore(module)
    del module.recipe
    forget_activation(module)
