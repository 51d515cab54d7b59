"""How layers multiply whose weights a folder has quantized: as it says, or a user does."""

from __future__ import annotations

from collections.abc import Mapping

from ..checkpoint.storage import Description
from ..formats import FP8_BLOCK
from ..nn.recipe import Recipe
from .config import FOLDER
from .plan import Plan, module_of

__all__ = ["recipes_of"]


def recipes_of(
    plan: Plan, activations: Mapping[str, str], given: Recipe | None, *, ue8m0: bool = False
) -> dict[str, Recipe]:
    """Recipe of each module that holds quantized parameters.

    ``activations``: format of weights -> that of activations, as the folder says, and ``ue8m0``
    that FP8's scales of these are powers of two; ``given``: by the user.
    Raises ValueError where a module has several formats, or others than the recipe that is given.
    """
    found: dict[str, Recipe] = {}
    for parameter, sources in plan.items():
        module = module_of(parameter)
        for name, description, _ in (each for some in sources.values() for each in some):
            recipe = _stored_recipe(name, description, activations, ue8m0)
            if given is not None:
                recipe = _given_recipe(given, module, name, recipe)
            if found.setdefault(module, recipe) != recipe:
                raise ValueError(
                    f"model: {module} has weights of several formats, {found[module]} and {recipe} "
                    f"({name}); one module of transformers has one: convert the folder by "
                    "`blockscale convert-checkpoint --format`"
                )
    return found


def _stored_recipe(
    name: str, description: Description, activations: Mapping[str, str], ue8m0: bool
) -> Recipe:
    format = description.format.name
    if format not in activations:
        raise ValueError(
            f"{FOLDER}: {name} is in {format}, and config.json speaks of "
            f"{', '.join(activations)}; fetch the folder again"
        )
    of_input = activations[format]
    if (of_input, format) == ("fp8_1x128", "fp8_128x128"):
        rounding = "rceil" if ue8m0 else description.storage.scale_rounding
        return Recipe(FP8_BLOCK, scale_rounding=rounding)
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
