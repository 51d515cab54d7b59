"""Models for inference: weights held quantized, high-precision masters dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..quantize_checks import DTYPES
from ..tensor import ScaledTensor
from .attention import set_fast_paths
from .class_change import become
from .forms import quantize_forms
from .group_checks import check_inference_recipe_of_groups
from .holds import check_held, own_global_scale
from .kinds import CONVERTED, QUANTIZED, QUANTIZED_STACKS, Kind
from .recipe import Recipe, check_inference_recipe, check_recipe
from .report import ConversionReport, publish
from .seeds import Stepping
from .survey import (
    FilterFn,
    Layer,
    by_override,
    check_filter,
    check_lazy,
    check_model,
    entry_of,
    nothing_was,
    report_on,
    survey,
)

__all__ = ["held_weight", "quantize_"]


def quantize_(
    model: torch.nn.Module,
    recipe: Recipe,
    filter_fn: FilterFn | None = None,
    *,
    report: ConversionReport | None = None,
) -> torch.nn.Module:
    """Quantize the weights of linear layers and of experts in place, for inference.

    >>> bs.quantize_(model, bs.Recipe("mxfp8"))  # forward as of a converted model, bit for bit
    >>> bs.quantize_(other, bs.Recipe("nvfp4", activations="bfloat16"))  # weight-only
    >>> other.load_state_dict(bs.checkpoint.load_file("model.nvfp4.safetensors"))

    torch.nn.Linear, :class:`blockscale.nn.Linear` and Conv1D of transformers, and subclasses of
    these without a ``forward`` of their own, become :class:`blockscale.nn.QuantizedLinear` (or a
    like of it): the weight is a :class:`~blockscale.ScaledTensor`, placed as the device's kernels
    read it, and the master is dropped; weights that layers share stay shared. A layer whose weight
    is a ScaledTensor already, by ``load_state_dict(state, assign=True)`` of a quantized checkpoint,
    takes it as it is. Experts of transformers, all that it marks by ``use_experts_implementation``,
    become :class:`blockscale.nn.QuantizedExperts`, and :class:`blockscale.nn.GatedExperts` hold
    their stacks likewise, both with a global scale for each expert. torch.nn.MultiheadAttention and
    what else has matrices stay as they are, which the report says.

    Args:
        recipe: formats of weights and activations; ``activations="bfloat16"`` leaves activations
            as they are. Its other fields are for training, but for ``scale_rounding`` and
            ``overrides``, of which None leaves a layer in high precision.
        filter_fn, report: as of :func:`blockscale.convert`, with the same layers left alone by
            default.

    Returns the model. Raises TypeError for a model, a recipe or a filter_fn that is none;
    ValueError where no layer can be quantized, for lazy layers that have no shape yet, for
    ``high_precision`` with fprop, for experts whose activations cannot be quantized in groups
    ("fp8_128x128", and ``quantization`` that does more than round them), and for weights that are
    quantized otherwise than ``recipe`` says. Then the model is as it was.
    """
    check_model(model)
    check_filter(filter_fn)
    check_recipe(recipe, knows_names=True)
    layers, left = survey(model, filter_fn, CONVERTED + QUANTIZED, _obstacle, recipe)
    if not layers:
        raise nothing_was("quantized", left)
    recipes = {layer.name: _recipe_of(layer, recipe) for layer in layers}
    for layer in layers:
        _check(layer, recipes[layer.name])
    _check_left(model, recipe)
    entries = [entry_of(name, module, by_override(recipe, name)) for name, module, _ in layers]
    keys = Counter(key for layer in layers for key in _keys(layer, recipes[layer.name]).values())
    made: dict[Any, tuple[Tensor, torch.nn.Parameter]] = {}  # with masters, which keep their ids
    for layer in layers:
        module, its = layer.module, recipes[layer.name]
        for name, key in _keys(layer, its).items():
            master = module._parameters[name]
            assert master is not None
            if key in made:
                _, weight = made[key]
            else:
                weight = held_weight(master, its, key.axis)
                if keys[key] > 1:
                    made[key] = master, weight
            setattr(module, name, weight)
            del master, weight  # the next is made when this one's is dropped
        _become(layer, its)
    set_fast_paths(model, CONVERTED + QUANTIZED)
    publish(report_on(model, layers, entries, left), report)
    return model


class _Key(NamedTuple):
    """Equal where layers share a quantized weight."""

    master: int
    axis: int
    recipe: Recipe


def _keys(layer: Layer, recipe: Recipe) -> dict[str, _Key]:
    """Of the weights that a layer is to hold quantized."""
    parameters = layer.module._parameters
    return {name: _Key(id(parameters[name]), axis, recipe) for name, axis in _held(layer).items()}


def _held(layer: Layer) -> Mapping[str, int]:
    assert layer.kind.quantized is not None  # else there was an obstacle
    return layer.kind.quantized.held(layer.module)


def _become(layer: Layer, recipe: Recipe) -> None:
    """Make a layer one that holds the weights that it has been given."""
    module, kind = layer.module, layer.kind
    assert kind.quantized is not None
    if not isinstance(module, QUANTIZED):
        if isinstance(module, Stepping):
            module.set_rounding(None, 0)
        become(module, kind.quantized)
    module.recipe = recipe  # type: ignore[assignment]
    module._begin_holding()  # type: ignore[operator]


def _obstacle(kind: Kind, module: torch.nn.Module) -> str:
    if kind.quantized is None:
        return "its matrices are no layers that could hold quantized weights; see bs.convert"
    found = (_why_not(n, module._parameters.get(n)) for n in kind.quantized.held(module))
    return next(filter(None, found), "")


def _why_not(name: str, weight: Tensor | None) -> str:
    """Why a weight cannot be held quantized; "" if it can."""
    if weight is None:
        return f"its {name} is computed, it is no parameter; remove what computes it first"
    if isinstance(weight, ScaledTensor) or torch.nn.parameter.is_lazy(weight):
        return ""
    if type(weight) is not torch.nn.Parameter:
        kind = type(weight).__name__
        return f"its {name} is a {kind}: quantize before ranks share or gather it"
    if weight.dtype not in DTYPES:
        allowed = ", ".join(map(str, DTYPES))
        return f"its {name} is {tuple(weight.shape)} {weight.dtype}; cast it to one of {allowed}"
    if not weight.numel():
        return f"its {name} is {tuple(weight.shape)}, which is empty"
    return ""


def _recipe_of(layer: Layer, recipe: Recipe) -> Recipe:
    found = recipe.of(layer.name)
    assert found is not None
    check_inference_recipe(found)
    if layer.kind.quantized in QUANTIZED_STACKS:
        check_inference_recipe_of_groups(found)
    if "fprop" in found.high_precision:
        raise ValueError(
            f"recipe: {found} leaves fprop in high precision, there is nothing to quantize; pass "
            "activations='bfloat16' for quantized weights alone"
        )
    return found


def _check_left(model: torch.nn.Module, recipe: Recipe) -> None:
    """ValueError of a layer that stays in high precision, and is quantized."""
    for name, module in model.named_modules():
        if isinstance(module, QUANTIZED) and recipe.of(name) is None:
            raise ValueError(
                f"recipe: leaves {name} in high precision, for {recipe.pattern_of(name)!r}, whose "
                "weight is quantized already; take the model as it was before"
            )


def _check(layer: Layer, recipe: Recipe) -> None:
    check_lazy(layer.name, layer.module)
    dims = 3 if layer.kind.quantized in QUANTIZED_STACKS else 2
    for name, axis in _held(layer).items():
        weight = layer.module._parameters[name]
        if isinstance(weight, ScaledTensor):
            why = check_held(weight, recipe, axis, dims)
            if why:
                raise ValueError(f"model: {name} of {layer.name or 'the layer'} {why}")


def held_weight(
    weight: Tensor, recipe: Recipe, axis: int, global_scale: Tensor | None = None
) -> torch.nn.Parameter:
    """A weight as its layer holds it; one that is quantized already, as it is.

    ``global_scale``: one for each matrix of a batch, too; None: of all of ``weight``.
    """
    if isinstance(weight, ScaledTensor):
        weight.requires_grad_(False)
        own_global_scale(weight)
        return weight  # type: ignore[return-value]
    transposed = axis == -2
    rows = weight.detach().mT.contiguous() if transposed else weight.detach().contiguous()
    operand = recipe.operand("weights")
    q = quantize_forms(rows, operand, rows=True, global_scale=global_scale).rows
    assert q is not None
    return torch.nn.Parameter(q.mT if transposed else q, requires_grad=False)
