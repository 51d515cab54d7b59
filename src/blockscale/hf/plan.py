"""Which parameters of a model the quantized tensors of a folder become, and by which recipes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ..checkpoint.storage import Description
from ..formats import FP8_BLOCK
from ..nn.recipe import Recipe

__all__ = ["Plan", "Source", "last_of", "module_of", "parameters_of", "plan_of", "recipes_of"]


class Source(NamedTuple):
    """A quantized tensor of the files."""

    name: str
    description: Description


#: Parameter -> pattern of names that it is made of -> tensors, in the order of the loader.
Plan = dict[str, dict[str, list[Source]]]


def plan_of(
    model: Any, descriptions: Mapping[str, Description], conversions: Sequence[Any]
) -> Plan:
    """Follow quantized tensors of files to parameters. Those that the model does not have are left
    out: transformers names them."""
    plan = Plan()
    for name, (parameter, pattern) in _followed(model, descriptions, conversions):
        sources = plan.setdefault(parameter, {}).setdefault(pattern or last_of(parameter), [])
        sources.append(Source(name, descriptions[name]))
    return plan


def parameters_of(model: Any, names: Iterable[str], conversions: Sequence[Any]) -> Iterator[str]:
    """The parameters that tensors of files become."""
    return (parameter for _, (parameter, _) in _followed(model, names, conversions))


def _followed(
    model: Any, names: Iterable[str], conversions: Sequence[Any]
) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """Name -> parameter, and the pattern of a converter that matched, by transformers' own rules.

    ``conversions`` are those of the model, which may stack and join tensors.
    """
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    prefix, state = model.base_model_prefix, model.state_dict()
    for name in sorted(names, key=dot_natural_key):
        found = rename_source_key(name, renamings, converters, prefix, state)
        if found[0] not in state:
            found = rename_source_key(name, [], [], prefix, state)
        if found[0] in state:
            yield name, found


def last_of(parameter: str) -> str:
    return parameter.rpartition(".")[2]


def module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def recipes_of(
    plan: Plan, activations: Mapping[str, str], given: Recipe | None
) -> dict[str, Recipe]:
    """Recipe of each module that holds quantized parameters.

    ``activations``: format of weights -> that of activations, as the folder says; ``given``: by the
    user.
    Raises ValueError where a module has several formats, or others than the recipe that is given.
    """
    found: dict[str, Recipe] = {}
    for parameter, sources in plan.items():
        module = module_of(parameter)
        for name, description in (each for some in sources.values() for each in some):
            recipe = _stored_recipe(name, description, activations)
            if given is not None:
                recipe = _given_recipe(given, module, name, recipe)
            if found.setdefault(module, recipe) != recipe:
                raise ValueError(
                    f"model: {module} has weights of several formats, {found[module]} and {recipe} "
                    f"({name}); one module of transformers has one: convert the folder by "
                    "`blockscale convert-checkpoint --format`"
                )
    return found


def _stored_recipe(name: str, description: Description, activations: Mapping[str, str]) -> Recipe:
    format = description.format.name
    if format not in activations:
        raise ValueError(
            f"pretrained_model_name_or_path: {name} is in {format}, and config.json speaks of "
            f"{', '.join(activations)}; fetch the folder again"
        )
    of_input = activations[format]
    if (of_input, format) == ("fp8_1x128", "fp8_128x128"):
        return Recipe(FP8_BLOCK, scale_rounding=description.storage.scale_rounding)
    return Recipe(format, activations=None if of_input == format else of_input)


def _given_recipe(given: Recipe, module: str, name: str, stored: Recipe) -> Recipe:
    recipe, format = given.of(module), stored.format_of("weights").name
    if recipe is None:
        raise ValueError(
            f"quantization_config: its recipe leaves {module} in high precision, and {name} is "
            f"{format} in the folder; leave that override out, or write the folder anew by "
            "`blockscale convert-checkpoint --to bf16`"
        )
    if recipe.format_of("weights").name != format:
        raise ValueError(
            f"quantization_config: its recipe {recipe} has weights of another format than {name}, "
            f"which is {format}; pass bs.Recipe({format!r}, ...), with overrides where formats are "
            "mixed, or none"
        )
    return recipe
