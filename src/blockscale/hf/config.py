"""What says how a model of transformers is quantized: ``quantization_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint.conventions import CONVENTIONS
from ..checkpoint.conventions.convention import activations_of
from ..checkpoint.conventions.own import BLOCKSCALE
from ..checkpoint.reading import convention_of
from ..checks import choose
from ..nn.recipe import Recipe, check_recipe

__all__ = ["FOLDER", "METHOD", "BlockscaleConfig", "convention_to_write", "is_ours"]

METHOD = "blockscale"
#: The argument of ``from_pretrained`` that messages name.
FOLDER = "pretrained_model_name_or_path"


class BlockscaleConfig(QuantizationConfigMixin):
    """Load a model of transformers with weights that are quantized, or quantize them on the way.

    >>> config = bs.hf.BlockscaleConfig(bs.Recipe("nvfp4", activations="bfloat16"))
    >>> AutoModelForCausalLM.from_pretrained("Llama-3-8B", quantization_config=config)

    Args:
        recipe: of the layers, as :func:`blockscale.quantize_` takes it; ``overrides`` leave layers
            in high precision. Of a folder that is quantized it has to have the folder's formats:
            it says what becomes of activations. None: what the folder says.
        convention: in which ``save_pretrained`` writes: a name of
            :data:`blockscale.checkpoint.CONVENTIONS`. None: that of the folder, or "blockscale".

    Raises TypeError for a recipe that is none, ValueError for an unknown convention.
    """

    def __init__(self, recipe: Recipe | str | None = None, convention: str | None = None) -> None:
        recipe = Recipe(recipe) if isinstance(recipe, str) else recipe
        if recipe is not None:
            check_recipe(recipe, knows_names=True)
        if convention is not None:
            choose("convention", convention, CONVENTIONS)
        self.quant_method: Any = METHOD  # theirs is an enumeration of their own
        self.recipe, self.convention = recipe, convention
        #: What ``config.json`` says, or will say when the model is saved.
        self.stored: dict[str, Any] = {}

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Of a ``quantization_config`` in a ``config.json``."""
        recipe, *rest = (config_dict.get(name) for name in ("recipe", "convention"))
        config = cls(Recipe.from_dict(recipe) if isinstance(recipe, Mapping) else recipe, *rest)
        config.stored = {k: v for k, v in config_dict.items() if k not in ("recipe", "convention")}
        return (config, kwargs) if return_unused_kwargs else config

    def get_loading_attributes(self) -> dict[str, Any]:
        """What of the one given to ``from_pretrained`` counts, beside what the folder says."""
        given = {"recipe": self.recipe, "convention": self.convention}
        return {name: value for name, value in given.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """What becomes ``quantization_config`` in ``config.json``."""
        if self.stored:
            return dict(self.stored)
        recipe = None if self.recipe is None else self.recipe.to_dict()
        return {"quant_method": METHOD, "recipe": recipe, "convention": self.convention}


def is_ours(quantization: Mapping[str, Any]) -> bool:
    """Whether blockscale reads weights of such a ``quantization_config``."""
    method = quantization.get("quant_method")
    known = next((each for each in CONVENTIONS.values() if method in each.methods), None)
    if known is None:
        return False
    try:
        return activations_of(quantization, known).keys() <= known.storages.keys()
    except ValueError:
        return False


def convention_to_write(config: BlockscaleConfig, model_type: str | None) -> str:
    """The convention that ``save_pretrained`` follows."""
    if config.convention is not None:
        return config.convention
    found = convention_of(
        {"quantization_config": config.stored or None, "model_type": model_type}, "model"
    )
    return BLOCKSCALE.name if found is None else found.name
