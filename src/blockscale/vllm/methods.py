"""Which method of vLLM's runs a layer. Imported with the first layer, as it imports vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from .experts import BlockscaleMoEMethod, GptOssMoEMethod
from .linear import BlockscaleLinearMethod
from .table import Table

if TYPE_CHECKING:
    from .config import BlockscaleConfig

__all__ = ["method_of"]


def method_of(
    layer: Any, prefix: str, config: BlockscaleConfig, table: Table
) -> QuantizeMethodBase | None:
    """What runs a layer of this name; None: what vLLM has for one that is not quantized.

    Raises ValueError, with the remedy, for a layer that has a quantized weight and no method.
    """
    if isinstance(layer, Attention | MLAAttention):
        if isinstance(layer, MLAAttention):
            _check_latent(prefix, table)
        return BaseKVCacheMethod(config)  # FP8 caches are vLLM's own
    if isinstance(layer, RoutedExperts):
        if (kind := table.stacks(prefix)) is not None:
            return GptOssMoEMethod(layer.moe_config, config, kind, prefix)
        if (kind := table.experts(prefix)) is None:
            return None
        return BlockscaleMoEMethod(layer.moe_config, config, kind, prefix)
    is_tied = isinstance(layer, ParallelLMHead) and not table.has(prefix)
    if isinstance(layer, LinearBase | ParallelLMHead) and not is_tied:
        if (kind := table.linear(prefix, config.packed_modules_mapping)) is None:
            return UnquantizedLinearMethod()
        _check_adapters(prefix)
        return BlockscaleLinearMethod(config, kind, prefix)
    if f"{prefix}.weight" in table.kinds:
        what = "embedding" if isinstance(layer, VocabParallelEmbedding) else "layer"
        raise ValueError(
            f"{prefix}: this {what} ({type(layer).__name__}) has a quantized weight, and "
            "blockscale serves linear layers and experts; quantize without it (blockscale "
            "quantize --exclude), or serve it without quantization='blockscale'"
        )
    return None


def _check_latent(prefix: str, table: Table) -> None:
    """Latent attention keeps a copy of ``kv_b_proj`` in bf16, which it asks the layer for."""
    name = f"{prefix.rpartition('.')[0]}.kv_b_proj"
    if f"{name}.weight" in table.kinds:
        raise ValueError(
            f"{name}: vLLM's latent attention multiplies by a bf16 copy of this weight, which "
            "blockscale does not make; quantize without it (blockscale quantize --exclude "
            "'*kv_b_proj*'), or serve it without quantization='blockscale'"
        )


def _check_adapters(prefix: str) -> None:
    config = get_current_vllm_config_or_none()
    if config is not None and config.lora_config is not None:
        raise ValueError(
            f"{prefix}: LoRA adapters were never run beside blockscale's layers; serve without "
            "--enable-lora, or without quantization='blockscale'"
        )
