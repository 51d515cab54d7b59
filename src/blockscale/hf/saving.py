"""What ``save_pretrained`` writes of a quantized model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from ..checkpoint.conventions.convention import KV_CACHE_KEYS
from ..checkpoint.saving import Written, written_as
from ..nn.fused_projections import FusedPart
from ..nn.kinds import QUANTIZED
from ..nn.quantized import QuantizedLinear
from ..tensor import ScaledTensor
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
    found = {name: _named(input_scales, name, model.base_model_prefix) for name in state}
    known = {name: scale for name, scale in found.items() if scale is not None}
    lost = [n for n, t in state.items() if isinstance(t, ScaledTensor) and n not in known]
    if input_scales and lost:
        warnings.warn(
            f"model: the folder's input_scale of {len(lost)} weights ({lost[0]}, ...) has another "
            "name there, and is saved as 1; calibrate anew by `blockscale quantize --calibrate`",
            UserWarning,
            stacklevel=2,
        )
    made = written_as(
        convention_to_write(config, plain.get("model_type")),
        state,
        weight_only=any(recipe.weight_only for recipe in recipes),
        input_scales=known,
        config=plain,
    )
    if config.convention is None and config.recipe is None and config.stored:
        # what the folder said, in its own words; of keys and values no scales are here
        quantization = {**config.stored}
        quantization |= {key: None for key in KV_CACHE_KEYS if quantization.get(key) is not None}
        made = made._replace(config={**made.config, "quantization_config": quantization})
    return made


def _by_files(model: Any, conversions: Sequence[Any]) -> dict[str, Tensor]:
    view = copy.copy(model)  # another thread may save it, too
    view._weight_conversions = list(conversions)
    state = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, (QuantizedLinear, FusedPart)):
            state.pop(f"{name}.input_scale", None)  # written from what the files had
    found: dict[str, Tensor] = revert_weight_conversion(view, state)
    return found


def _named(scales: Mapping[str, float], name: str, prefix: str) -> float | None:
    """The input scale of a weight: of a model without its head files have a prefix more."""
    for each in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        if each in scales:
            return scales[each]
    return None
