"""vLLM's configuration of a quantized checkpoint: which layer is run by what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.transformers_utils.config import get_safetensors_params_metadata

from ..checkpoint.files import Files
from ..checkpoint.folders import read_config
from ..checkpoint.header import Stored
from ..checkpoint.reading import convention_of, described_by, descriptions_of
from . import METHOD
from .linear import BlockscaleLinearMethod
from .schemes import activations_of, kv_cache_scheme_of, served_recipe
from .table import Table
from .weights import Kind

__all__ = ["BlockscaleConfig"]


class BlockscaleConfig(QuantizationConfig):
    """What vLLM asks about a checkpoint that is served by blockscale's layers.

    Which layers are quantized is read from the headers of its files when vLLM names it
    (``maybe_update_config``); what becomes of activations is said by its config.json.
    """

    def __init__(self, quantization: dict[str, Any]) -> None:
        super().__init__()
        self.quantization = quantization
        convention = convention_of({"quantization_config": quantization}, "quantization")
        assert convention is not None
        self.activations = activations_of(quantization, convention)
        self.describes_itself = convention.describes_itself
        self.kv_cache_scheme = kv_cache_scheme_of(quantization)
        self.table: Table | None = None

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]  # what kernels multiply

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # a device is asked for its kernels, which says why there are none

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["hf_quant_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BlockscaleConfig:
        older = config.get("quantization")  # of ModelOpt, in a file of its own
        if isinstance(older, dict):
            config = {"quant_method": "modelopt", **older}
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Where a user asks for blockscale, whatever the checkpoint's own method is."""
        return METHOD if user_quant == METHOD else None

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Read which tensors are quantized. ValueError, with the remedy, for what is not known."""
        if Path(model_name).is_dir():
            with Files(model_name, "model") as files:
                config = read_config(files, "model")
                config.setdefault("quantization_config", self.quantization)
                found, tensors = descriptions_of(files, config, "model"), files.tensors
        else:
            found, tensors = self._on_a_hub(model_name, hf_config, revision)
        self.table = Table.of(found, tensors)
        for name, kind in self.table.kinds.items():
            if kind.format_name not in self.activations:
                raise ValueError(
                    f"model: {name} is in {kind.format_name}, and its config.json speaks of "
                    f"{', '.join(self.activations)}; fetch it again, or serve it without "
                    "quantization='blockscale'"
                )

    def _on_a_hub(self, name: str, hf_config: Any, revision: str | None) -> tuple[Any, Any]:
        if self.describes_itself:
            raise ValueError(
                f"model: {name} describes its tensors in the headers of its files, which are read "
                f"from a folder only; fetch it (hf download {name}) and serve the folder"
            )
        about = get_safetensors_params_metadata(name, revision=revision)
        if not about:
            raise ValueError(
                f"model: {name} has no safetensors files that can be read, so blockscale cannot "
                f"tell what is quantized; fetch it (hf download {name}) and serve the folder"
            )
        tensors = {
            key: Stored(each["dtype"], tuple(each["shape"]), 0, 0) for key, each in about.items()
        }
        config = hf_config.to_dict() | {"quantization_config": self.quantization}
        return described_by(tensors, config, "model"), tensors

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        if self.table is not None:
            self.table = self.table.renamed(hf_to_vllm_mapper._map_name)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if self.table is None:
            raise ValueError(
                f"{prefix}: no checkpoint was named to blockscale, so that it cannot tell what is "
                "quantized; serve a folder or a name on a hub, with its weights"
            )
        if isinstance(layer, Attention | MLAAttention):
            if isinstance(layer, MLAAttention):
                self._check_latent(prefix)
            return BaseKVCacheMethod(self)  # FP8 caches are vLLM's own
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix)
        if isinstance(layer, ParallelLMHead) and f"{prefix}.weight" not in (
            self.table.names | self.table.kinds.keys()
        ):
            return UnquantizedLinearMethod()  # tied to the embedding
        if isinstance(layer, LinearBase | ParallelLMHead):
            kind = self.table.linear(prefix, self.packed_modules_mapping)
            if kind is None:
                return UnquantizedLinearMethod()
            self._check_adapters(prefix)
            return BlockscaleLinearMethod(kind, self._recipe(kind), prefix)
        self._check_other(layer, prefix)
        return None

    def _recipe(self, kind: Kind) -> Any:
        recipe = served_recipe(kind.format_name, self.activations[kind.format_name])
        needs = not recipe.weight_only and recipe.format_of("activations").has_global_scale
        if needs and "input_scale" not in kind.places:
            raise ValueError(
                "model: activations are quantized with a global scale, and its layers have no "
                "input_scale; add what is missing: blockscale convert-checkpoint IN OUT --to "
                "modelopt --repair, or quantize with --calibrate"
            )
        return recipe

    def _experts(self, layer: Any, prefix: str) -> QuantizeMethodBase:
        assert self.table is not None
        kind = self.table.experts(prefix)
        if kind is None:
            return UnquantizedFusedMoEMethod(layer.moe_config)
        raise NotImplementedError(prefix)

    def _check_other(self, layer: torch.nn.Module, prefix: str) -> None:
        """ValueError for a layer of another kind that has a quantized weight."""
        assert self.table is not None
        if f"{prefix}.weight" in self.table.kinds:
            what = "embedding" if isinstance(layer, VocabParallelEmbedding) else "layer"
            raise ValueError(
                f"{prefix}: this {what} ({type(layer).__name__}) has a quantized weight, and "
                "blockscale serves linear layers and experts; quantize without it (blockscale "
                "quantize --exclude), or serve it without quantization='blockscale'"
            )

    def _check_latent(self, prefix: str) -> None:
        """Latent attention keeps a copy of ``kv_b_proj`` in bf16, which it asks the layer for."""
        assert self.table is not None
        name = f"{prefix.rpartition('.')[0]}.kv_b_proj"
        if f"{name}.weight" in self.table.kinds:
            raise ValueError(
                f"{name}: vLLM's latent attention multiplies by a bf16 copy of this weight, which "
                "blockscale does not make; quantize without it (blockscale quantize --exclude "
                "'*kv_b_proj*'), or serve it without quantization='blockscale'"
            )

    def _check_adapters(self, prefix: str) -> None:
        config = get_current_vllm_config_or_none()
        if config is not None and config.lora_config is not None:
            raise ValueError(
                f"{prefix}: LoRA adapters were never run beside blockscale's layers; serve without "
                "--enable-lora, or without quantization='blockscale'"
            )
