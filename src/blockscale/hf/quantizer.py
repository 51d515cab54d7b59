"""The quantizer that transformers calls when it loads and saves a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.quantizers.base import HfQuantizer

from ..checkpoint.conventions import CONVENTIONS
from ..checkpoint.conventions.convention import activations_of
from ..checkpoint.files import Files
from ..checkpoint.reading import convention_of, descriptions_of
from ..checkpoint.saving import check_formats
from ..checkpoint.storage import Description, Storage
from ..fused_names import fused_with
from ..nn.quantize import quantize_
from ..nn.recipe import Recipe
from ..tensor import ScaledTensor
from .config import FOLDER, BlockscaleConfig, convention_to_write
from .layers import (
    Expected,
    dequantize_layers,
    expected_of,
    layers_without,
    place_layers,
    quantize_layers,
    quantized_group,
    set_input_scales,
)
from .operations import Assemble, Quantize, reading_parts
from .plan import last_of, module_of, parameters_of, plan_of
from .recipes import recipes_of
from .saving import written

__all__ = ["BlockscaleQuantizer"]


class BlockscaleQuantizer(HfQuantizer):
    """Loads quantized folders, quantizes others on the way, and writes conventions.

    Layers are changed before any weight is read: what cannot be is refused at once.
    """

    quantization_config: BlockscaleConfig

    def __init__(self, quantization_config: BlockscaleConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        #: Names of the tensors in the files, where these can be read beforehand.
        self.stored: list[str] | None = None
        self.descriptions: dict[str, Description] = {}
        self.on_the_way: Quantize | None = None
        #: What the folder's convention says.
        self.activations: dict[str, str] = {}
        self.transposed_stacks = False
        #: Of files, by the names of weights there, for saving.
        self.input_scales: dict[str, float] = {}
        #: Shape and axis of what layers hold.
        self.expected: dict[str, Expected] = {}
        #: Parameter -> names in the files of what it is made of.
        self.sources: dict[str, list[str]] = {}
        #: The model's own, for saving.
        self.conversions: list[Any] = []

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "device_map: has layers on the disk, and quantized weights have no storage that "
                "could be mapped from it; leave them on a GPU or the CPU"
            )
        if not self.pre_quantized and self.quantization_config.recipe is None:
            raise ValueError(
                "quantization_config: the model is not quantized, and this has no recipe; pass "
                'bs.hf.BlockscaleConfig(bs.Recipe("nvfp4", activations="bfloat16")), or another'
            )

    # --- before weights are read ------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> Any:
        """Look at what the files have; which layers that is, is known with the conversions."""
        paths = [Path(path) for path in checkpoint_files or ()]
        is_read = bool(paths) and all(path.suffix == ".safetensors" for path in paths)
        if is_read:
            # of one file its index counts, if it has one; a folder may hold files of other models
            names = None if len(paths) == 1 else [path.name for path in paths]
            with Files(paths[0] if names is None else paths[0].parent, FOLDER, names) as files:
                self.stored = list(files.tensors)
                if self.pre_quantized:
                    self._read_descriptions(model, files)
        elif self.pre_quantized:
            raise ValueError(
                f"{FOLDER}: quantized weights are read from safetensors files, and there are "
                "none; load others by blockscale.checkpoint.load_file and load_state_dict"
            )
        return model

    def _read_descriptions(self, model: Any, files: Files) -> None:
        config = self.quantization_config
        told = {**model.config.to_dict(), "quantization_config": config.stored}
        convention = convention_of(told, FOLDER)
        assert convention is not None
        try:
            self.activations = activations_of(config.stored, convention)
        except ValueError as error:
            raise ValueError(f"{FOLDER}: {error}; load the model in high precision") from None
        self.transposed_stacks = convention.transposed_stacks
        self.descriptions = descriptions_of(files, told, FOLDER)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Change the layers; the model's converters, told to read parts of quantized tensors."""
        if getattr(model.config, "distributed_config", None) is not None:
            raise ValueError(
                "tp_plan: quantized weights are not cut among ranks here; leave it out, or serve "
                "the folder by vLLM"
            )
        self.conversions = list(weight_conversions)
        if not self.pre_quantized:
            self._quantize_on_the_way(model)
            return self.conversions
        plan = plan_of(model, self.descriptions, self.stored or (), weight_conversions)
        recipes = recipes_of(
            plan,
            self.activations,
            self.quantization_config.recipe,
            ue8m0=self.quantization_config.stored.get("scale_fmt") == "ue8m0",
        )
        quantize_layers(model, recipes)
        self.expected = expected_of(model)
        self.sources = {
            parameter: [source.name for found in parts.values() for source in found]
            for parameter, parts in plan.items()
        }
        assemble = Assemble(plan, self.input_scales, self.transposed_stacks)
        return reading_parts(weight_conversions, plan, assemble)

    def _quantize_on_the_way(self, model: Any) -> None:
        """Layers whose weights the files do not have stay as they are made: a new head, say."""
        recipe = self.quantization_config.recipe
        assert recipe is not None
        if self.stored is not None:
            read = parameters_of(model, self.stored, self.conversions)
            left = dict.fromkeys(layers_without(model, set(read)))
            recipe = replace(recipe, overrides={**left, **dict(recipe.overrides)})
        quantize_(model, _as_stored(recipe, self._storages(model)))
        self.expected = expected_of(model)
        convention = convention_to_write(self.quantization_config, model.config.model_type)
        check_formats(convention, model.state_dict(), model.config.to_dict())
        scaled = {
            name
            for name, weight in model.named_parameters()
            if isinstance(weight, ScaledTensor) and weight.global_scale is not None
        }
        self.on_the_way = Quantize(
            lambda name: tuple(n for n in fused_with(name) if n in scaled) or (name,),
            lambda group: self._quantized(model, group),
        )

    # --- while they are read ----------------------------------------------------------------------

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """Parts of quantized tensors keep theirs; the operation casts what turns out to be none."""
        operation = next(iter(getattr(converter, "operations", ())), None)
        if not isinstance(operation, Assemble):
            return super().get_new_dtype(converter, param, dtype)
        operation.dtype = dtype
        return None

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """On the way alone: of others transformers compares the shapes."""
        return not self.pre_quantized and isinstance(_parameter(model, param_name), ScaledTensor)

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        size = param.nbytes / max(param.numel(), 1)
        return size if isinstance(param, ScaledTensor) else param.element_size()

    def get_quantize_ops(self) -> Quantize | None:
        return self.on_the_way

    def _quantized(self, model: Any, group: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return quantized_group(model, group, self._storages(model))

    def _storages(self, model: Any) -> Mapping[str, Storage]:
        """In which it will be saved."""
        convention = convention_to_write(self.quantization_config, model.config.model_type)
        return CONVENTIONS[convention].storages

    # --- after ------------------------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.on_the_way is not None and self.on_the_way.waiting:
            raise ValueError(
                f"model: {next(iter(self.on_the_way.waiting))} was read, but none of the weights "
                "that share its global scale; leave it out by an override of None"
            )
        place_layers(model, self.expected)
        set_input_scales(model, self.sources, self.input_scales)
        # a model is copied and pickled with this
        self.on_the_way, self.expected, self.descriptions = None, {}, {}
        self.stored, self.sources = None, {}
        used = [each for each in self.conversions if each.was_used()]
        self.conversions = used
        model._weight_conversions = []  # get_state_dict_and_metadata reverses them
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        config = self.quantization_config
        made = written(model, config, self.conversions, self.input_scales)
        others = dict(made.config)
        config.stored = dict(others.pop("quantization_config"))
        model.config.update(others)
        inner = model.config.get_text_config()
        if inner is not model.config and hasattr(inner, "quantization_config"):
            del inner.quantization_config  # the folder's, of a model with more than text
        return made.tensors, made.metadata

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        """The model as it was before, with the values that its weights stand for."""
        # save_pretrained leaves a name there
        dequantize_layers(model, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters are; what is quantized is not."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _as_stored(recipe: Recipe, storages: Mapping[str, Storage]) -> Recipe:
    """With scales that can be saved so: powers of two, where a convention has no others."""
    storage = storages.get(recipe.format_of("weights").name)
    if storage is None or storage.scale_rounding is None or recipe.scale_rounding is not None:
        return recipe
    return replace(recipe, scale_rounding=storage.scale_rounding)


def _parameter(model: Any, name: str) -> Any:
    return getattr(model.get_submodule(module_of(name)), last_of(name), None)
