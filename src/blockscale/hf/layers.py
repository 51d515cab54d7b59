"""Layers of a model before its weights are read, while they are, and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint.ours import INPUT_SCALE
from ..checkpoint.storage import Storage
from ..formats import get_format
from ..measure import amax
from ..nn.class_change import restore
from ..nn.held_experts import QuantizedExperts
from ..nn.hf_activation import INPUT_SCALES
from ..nn.holds import HoldsQuantized
from ..nn.kinds import Kind, kind_of
from ..nn.quantize import held_weight, quantize_
from ..nn.quantized import has_input_scale
from ..nn.recipe import Recipe
from ..nn.report import ConversionReport
from ..rounding import global_scale_from_amax
from ..tensor import ScaledTensor
from .config import FOLDER
from .plan import last_of, module_of

__all__ = [
    "Expected",
    "dequantize_layers",
    "expected_of",
    "layers_without",
    "place_layers",
    "quantize_layers",
    "quantized_group",
    "set_input_scales",
]


def layers_without(model: Any, read: Collection[str]) -> Iterator[str]:
    """Layers that could hold weights which are not read."""
    for name, module in model.named_modules():
        kind = kind_of(module)
        if isinstance(kind, Kind) and kind.quantized is not None:
            held = [f"{name}.{own}" for own in kind.quantized.held(module)]
            if not all(each in read for each in held):
                yield name


class Expected(NamedTuple):
    """What a parameter has to be."""

    shape: tuple[int, ...]
    axis: int


def expected_of(model: Any) -> dict[str, Expected]:
    """Of the parameters that layers hold quantized, before they are read."""
    return {
        name: Expected(tuple(weight.shape), weight.axis)
        for name, weight in model.named_parameters()
        if isinstance(weight, ScaledTensor)
    }


def quantize_layers(model: Any, recipes: Mapping[str, Recipe]) -> None:
    """Make layers, whose weights are not there yet, ones that hold them quantized."""
    if not recipes:
        raise ValueError(
            f"model: none of the quantized tensors of the folder is one of {type(model).__name__}; "
            "load it as the architecture that its config.json names"
        )
    for name in recipes:
        module = model.get_submodule(name)
        kind = kind_of(module)
        if not isinstance(kind, Kind) or kind.quantized is None:
            raise ValueError(
                f"model: {name} is a {type(module).__name__}, whose weight is quantized in the "
                "folder, and blockscale has no such layer: leave it out when the folder is made "
                "(--exclude), or write its values by `blockscale convert-checkpoint --to bf16`"
            )
    base = Counter(recipes.values()).most_common(1)[0][0]
    others = {name: recipe for name, recipe in recipes.items() if recipe != base}
    recipe = replace(base, overrides=others)
    # what is quantized, the folder says: there is nothing to report
    quantize_(model, recipe, lambda module, name: name in recipes, report=ConversionReport())


def quantized_group(
    model: Any, group: Mapping[str, Tensor], storages: Mapping[str, Storage]
) -> dict[str, Tensor]:
    """Parameters as their layers hold them, with the global scales that they share: one of a
    matrix, and of a stack one for each, as files have experts. ``storages``: in which they will be
    saved."""
    scale, out = None, dict[str, Tensor]()
    for name, plain in group.items():
        module = model.get_submodule(module_of(name))
        operand, axis = module.recipe.operand("weights"), module.held(module)[last_of(name)]
        format = get_format(operand.format)
        if format.has_global_scale and scale is None:
            storage = storages.get(format.name)
            scale = global_scale_from_amax(
                torch.stack([_amax(each) for each in group.values()]).amax(0),
                format,
                operand.rows.scaling,
                power_of_two=storage is not None and storage.divides,
            )
        own = None if scale is None else scale.clone()  # layers are loaded one by one later
        out[name] = held_weight(plain, module.recipe, axis, own)
    return out


def _amax(weight: Tensor) -> Tensor:
    return amax(weight) if weight.dim() == 2 else torch.stack([amax(each) for each in weight])


def place_layers(model: Any, expected: Mapping[str, Expected]) -> None:
    """Weights that were read, as the kernels of their device read them."""
    _quantize_tied(model)
    for name, module in model.named_modules():
        if isinstance(module, HoldsQuantized):
            for own in module.held(module):
                weight, wanted = getattr(module, own), expected.get(f"{name}.{own}")
                _check_read(f"{name}.{own}", weight, wanted)
                weight.requires_grad_(False)
            module._place()


def _quantize_tied(model: Any) -> None:
    """Layers that were given the weight of another one."""
    recipes = {
        id(getattr(module, own)): module.recipe
        for module in model.modules()
        if isinstance(module, HoldsQuantized)
        for own in module.held(module)
    }
    for name, module in list(model.named_modules()):
        for own, weight in module._parameters.items():
            if not isinstance(weight, ScaledTensor) or isinstance(module, HoldsQuantized):
                continue
            if id(weight) not in recipes:
                raise ValueError(
                    f"model: {name}.{own} is quantized, and {type(module).__name__} is no layer "
                    "that multiplies by it; leave it out when the folder is made (--exclude)"
                )
            quantize_layers(model, {name: recipes[id(weight)]})
            break


def _check_read(name: str, weight: Tensor, expected: Expected | None) -> None:
    if not isinstance(weight, ScaledTensor) or weight.device.type == "meta":
        raise ValueError(
            f"{FOLDER}: {name} was not read, see what transformers says above; the model would "
            "have no such weight: fetch the folder again"
        )
    found = Expected(tuple(weight.shape), weight.axis)
    if expected is not None and found != expected:
        raise ValueError(
            f"{FOLDER}: {name} is {found.shape} with blocks along axis {found.axis}, and the model "
            f"that config.json describes has {expected.shape} along {expected.axis}; fetch the "
            "folder again"
        )


def set_input_scales(
    model: Any, sources: Mapping[str, Sequence[str]], scales: Mapping[str, float]
) -> None:
    """Give layers the global scales of their activations, if the folder was calibrated. Experts
    share the largest of theirs, as one launch quantizes the rows of all.

    ``sources``: parameter -> names in the files of what it is made of.
    """
    for parameter, names in sources.items():
        module = model.get_submodule(module_of(parameter))
        found = [scales[name] for name in names if scales.get(name, INPUT_SCALE) != INPUT_SCALE]
        if not found or not isinstance(module, HoldsQuantized):
            continue
        if not has_input_scale(module.recipe):
            continue
        own = "input_scale"
        if isinstance(module, QuantizedExperts):
            own = INPUT_SCALES[last_of(parameter) == "down_proj"]
        if own in module._buffers:
            device = getattr(module, last_of(parameter)).device
            setattr(module, own, torch.tensor(max(found), dtype=torch.float32, device=device))


def dequantize_layers(model: Any, dtype: torch.dtype | None) -> None:
    """Layers as they were before, with the values that their weights stand for."""
    for module in model.modules():
        if isinstance(module, HoldsQuantized):
            for own in module.held(module):
                values = getattr(module, own).dequantize(dtype)
                setattr(module, own, torch.nn.Parameter(values))
            del module.recipe
            for name in ("input_scale", *INPUT_SCALES):
                module._buffers.pop(name, None)
                module._non_persistent_buffers_set.discard(name)
            restore(module)
