"""Which method of vLLM's runs a layer. Imported with the first layer, as it imports vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from .experts import BlockscaleMoEMethod, GptOssMoEMethod
from .limits import check_adapters, check_latent, check_other
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
            check_latent(table, prefix)
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
        check_adapters(get_current_vllm_config_or_none(), prefix)
        return BlockscaleLinearMethod(config, kind, prefix)
    check_other(table, layer, prefix)
    return None
