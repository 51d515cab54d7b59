"""Layers of a model before its weights are read, while they are, and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.storage import Storage
from ..formats import get_format
from ..measure import amax
from ..nn.class_change import restore
from ..nn.holds import HoldsQuantized
from ..nn.kinds import Kind, kind_of
from ..nn.quantize import held_weight, quantize_
from ..nn.recipe import Recipe
from ..rounding import global_scale_from_amax
from ..tensor import ScaledTensor
from .plan import last_of, module_of

__all__ = [
    "FOLDER",
    "dequantize_layers",
    "layers_without",
    "place_layers",
    "quantize_layers",
    "quantized_group",
]

#: The argument of ``from_pretrained`` that messages name.
FOLDER = "pretrained_model_name_or_path"


def layers_without(model: Any, read: Collection[str]) -> Iterator[str]:
    """Layers of which no parameter is read."""
    for name, module in model.named_modules():
        own = [f"{name}.{parameter}" for parameter in module._parameters]
        if isinstance(kind_of(module), Kind) and not any(each in read for each in own):
            yield name


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
    quantize_(model, replace(base, overrides=others), lambda module, name: name in recipes)


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


def place_layers(model: Any) -> None:
    """Weights that were read, as the kernels of their device read them."""
    for name, module in model.named_modules():
        if isinstance(module, HoldsQuantized):
            for own in module.held(module):
                _check_read(f"{name}.{own}", getattr(module, own))
                getattr(module, own).requires_grad_(False)
            module._place()


def _check_read(name: str, weight: Tensor) -> None:
    if not isinstance(weight, ScaledTensor) or weight.device.type == "meta":
        raise ValueError(
            f"{FOLDER}: {name} was not read, see what transformers says above; the model would "
            "have no such weight: fetch the folder again"
        )


def dequantize_layers(model: Any, dtype: torch.dtype | None) -> None:
    """Layers as they were before, with the values that their weights stand for."""
    for module in model.modules():
        if isinstance(module, HoldsQuantized):
            for own in module.held(module):
                values = getattr(module, own).dequantize(dtype)
                setattr(module, own, torch.nn.Parameter(values))
            del module.recipe
            restore(module)
