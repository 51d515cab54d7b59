"""What ``save_pretrained`` writes of a quantized model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from ..checkpoint.saving import Written, written_as
from ..nn.kinds import QUANTIZED
from .config import BlockscaleConfig, convention_to_write

__all__ = ["written"]


def written(
    model: Any,
    config: BlockscaleConfig,
    conversions: Sequence[Any],
    input_scales: dict[str, float],
) -> Written:
    """The model's tensors, by the names of its files.

    ``conversions`` are those of the model, reversed here, while tensors are whole: transformers
    would do that with parts of them.
    """
    state = _by_files(model, conversions)
    recipes = {module.recipe for module in model.modules() if isinstance(module, QUANTIZED)}
    if len({recipe.weight_only for recipe in recipes}) > 1:
        raise ValueError(
            "model: some of its layers quantize activations and others do not, which no "
            "configuration of a folder says; save model.state_dict() by "
            "blockscale.checkpoint.save_file"
        )
    plain = model.config.to_dict()
    return written_as(
        convention_to_write(config, plain.get("model_type")),
        state,
        weight_only=any(recipe.weight_only for recipe in recipes),
        input_scales=input_scales,
        config=plain,
    )


def _by_files(model: Any, conversions: Sequence[Any]) -> dict[str, Tensor]:
    model._weight_conversions = list(conversions)
    try:
        found: dict[str, Tensor] = revert_weight_conversion(model, model.state_dict())
        return found
    finally:
        model._weight_conversions = []
