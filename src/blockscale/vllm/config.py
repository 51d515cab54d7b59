"""vLLM's configuration of a quantized checkpoint that blockscale's layers serve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

from ..checkpoint.conventions import Convention
from ..checkpoint.files import Files
from ..checkpoint.header import METADATA, Stored
from ..checkpoint.reading import convention_of, descriptions_of, descriptions_of_tensors
from ..nn.quantized import has_input_scale
from ..nn.recipe import Recipe
from . import METHOD
from .schemes import kv_cache_scheme_of, served_activations, served_recipe
from .table import Table
from .weights import Kind

__all__ = ["BlockscaleConfig"]


class BlockscaleConfig(QuantizationConfig):
    """What vLLM asks about a checkpoint that is served by blockscale's layers.

    vLLM makes it of a ``quantization_config``, and names the checkpoint then
    (``maybe_update_config``): the headers of its files say which layers are quantized.

    Attributes:
        kv_cache_scheme: of FP8 keys and values, which vLLM asks for by this name.
    """

    def __init__(self, quantization: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.quantization = quantization
        self.activations: Mapping[str, str] = {}
        self.kv_cache_scheme = kv_cache_scheme_of(quantization or {})
        self.table: Table | None = None

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]  # what kernels multiply

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # layers ask for their kernels, which says why there are none

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # vLLM's reader of config.json looks into ModelOpt's as well

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BlockscaleConfig:
        older = config.get("quantization")  # of ModelOpt, in a file of its own
        return cls({"quant_method": "modelopt", **older} if isinstance(older, dict) else config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Where a user asks for blockscale, whatever the checkpoint's own method is."""
        return METHOD if user_quant == METHOD else None

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Read what is quantized, and how. ValueError, with the remedy, for what is not known."""
        about = {} if hf_config is None else hf_config.to_dict()
        about["quantization_config"] = _as_written(self.quantization)
        convention = _convention(about)
        self.activations = served_activations(self.quantization or {}, convention)
        if Path(model_name).is_dir():
            with Files(model_name, "model") as files:
                found, tensors = descriptions_of(files, about, "model"), files.tensors
        else:
            tensors = _tensors_on_a_hub(model_name, convention, revision)
            found = descriptions_of_tensors(tensors, about, "model")
        self.table = Table.of(found, tensors)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        if self.table is not None:
            self.table = self.table.renamed(hf_to_vllm_mapper._map_name)

    def recipe(self, kind: Kind, layer: str) -> Recipe:
        """How a layer multiplies. ValueError where that is not told, or a scale is missing."""
        if kind.format_name not in self.activations:
            raise ValueError(
                f"{layer}: is in {kind.format_name}, and its config.json speaks of "
                f"{', '.join(self.activations)}; fetch the checkpoint again, or serve it without "
                "quantization='blockscale'"
            )
        recipe = served_recipe(kind.format_name, self.activations[kind.format_name])
        if has_input_scale(recipe) and "input_scale" not in kind.places:
            raise ValueError(
                f"{layer}: its activations are quantized to {self.activations[kind.format_name]}, "
                "and the checkpoint has no global scale for them (input_scale); add one by "
                "blockscale convert-checkpoint IN OUT --to modelopt --repair, or quantize with "
                "--calibrate"
            )
        return recipe

    def check_claimed(self) -> None:
        """ValueError where the model has no layer for a quantized weight. All layers are made."""
        if self.table is not None:
            self.table.check_claimed()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from .methods import method_of

        if self.table is None:
            raise ValueError(
                f"{prefix}: no checkpoint was named to blockscale, so that it cannot tell what is "
                "quantized; serve a folder or a name on a hub, with its weights"
            )
        return method_of(layer, prefix, self, self.table)


def _as_written(quantization: dict[str, Any] | None) -> dict[str, Any] | None:
    """A ``quantization_config`` as checkpoints have it: vLLM has names of its own."""
    if quantization and quantization.get("quant_method") == "gpt_oss_mxfp4":
        return {**quantization, "quant_method": "mxfp4"}
    return quantization


def _convention(config: Mapping[str, Any]) -> Convention:
    """What a configuration names. ValueError where it is unknown, or nothing is quantized."""
    try:
        found = convention_of(config, "quantization")
    except ValueError as error:
        raise ValueError(f"{error}: serve it without quantization='blockscale'") from None
    if found is None:
        raise ValueError(
            "quantization: 'blockscale' serves checkpoints that are quantized, and config.json has "
            "no quantization_config; make one (blockscale quantize IN OUT --format nvfp4 "
            "--convention modelopt), or serve it without quantization='blockscale'"
        )
    return found


def _tensors_on_a_hub(name: str, convention: Convention, revision: str | None) -> dict[str, Stored]:
    """What the headers of its files have. ValueError where they do not tell what is quantized."""
    from vllm.transformers_utils.config import get_safetensors_params_metadata

    own = convention.describes_itself  # in a part of headers that vLLM does not return
    about = {} if own else get_safetensors_params_metadata(name, revision=revision)
    if not about:
        raise ValueError(
            f"model: headers of {name} do not say what is quantized, or cannot be read from here; "
            f"fetch it (hf download {name}) and serve the folder"
        )
    return {
        key: Stored(each["dtype"], tuple(each["shape"]), 0, 0)
        for key, each in about.items()
        if key != METADATA
    }
