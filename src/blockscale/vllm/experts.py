"""vLLM's method of experts whose weights are quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import FusedMoeWeightScaleSupported
from vllm.model_executor.utils import set_weight_attrs

from .device import check_device
from .served import ServedExperts
from .weights import Kind, assemble_experts

if TYPE_CHECKING:
    from .config import BlockscaleConfig

__all__ = ["BlockscaleMoEMethod"]


class BlockscaleMoEMethod(FusedMoEMethodBase):
    """Parameters stacked as vLLM does, until the checkpoint is read; then ``layer.served``."""

    def __init__(self, moe: Any, config: BlockscaleConfig, kind: Kind, prefix: str) -> None:
        super().__init__(moe)
        self.config, self.kind, self.prefix = config, kind, prefix
        self.recipe = config.recipe(kind, prefix)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        _check(layer, self.prefix)
        sizes = {
            "w13": (2 * intermediate_size_per_partition, hidden_size),
            "w2": (hidden_size, intermediate_size_per_partition),
        }
        for stack, (rows, k) in sizes.items():
            for slot in self.kind.slots(k, f"{self.prefix}.{stack}"):
                loader = extra_weight_attrs["weight_loader"]
                if slot.columns is None:
                    shape, kind = (num_experts, 2)[: 1 + (stack == "w13")], "TENSOR"
                    loader = _load_number(layer)
                else:
                    shape, kind = (num_experts, rows, slot.columns), "GROUP"
                data = torch.empty(shape, dtype=slot.dtype)
                check_device(data.device, self.recipe, self.prefix, groups=True)
                self.kind.poison(slot.part, data)
                parameter = torch.nn.Parameter(data, requires_grad=False)
                layer.register_parameter(f"{stack}_{slot.name}", parameter)
                how = {"quant_method": FusedMoeWeightScaleSupported[kind].value}
                set_weight_attrs(parameter, {**extra_weight_attrs, **how, "weight_loader": loader})

    def process_weights_after_loading(self, layer: Any) -> None:
        self.config.check_claimed()
        up, down = self._taken(layer, "w13"), self._taken(layer, "w2")
        layer.served = ServedExperts(
            assemble_experts(self.kind, up, down, self.prefix), self.recipe
        )

    def _taken(self, layer: Any, stack: str) -> dict[str, Tensor]:
        """Part -> parameter, which the layer has no more."""
        names = {part: f"{stack}_{place.of('weight')}" for part, place in self.kind.places.items()}
        taken = {part: getattr(layer, name).data for part, name in names.items()}
        for name in names.values():
            delattr(layer, name)
        return taken

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Of kernels of vLLM, of which none runs."""
        return None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        return layer.served(x, topk_weights, topk_ids)


def _load_number(layer: Any) -> Callable[..., bool | None]:
    """A loader of a number for each expert, gate and up; vLLM's takes another by the method's
    name."""

    def load(
        param: torch.nn.Parameter,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        local = layer._map_global_expert_id_to_local_expert_id(expert_id)
        if local >= 0:
            layer._load_per_tensor_weight_scale(shard_id, param, loaded_weight, local)
        return local >= 0 if return_success else None

    return load


def _check(layer: Any, prefix: str) -> None:
    """ValueError for experts that are not SwiGLUs of their tokens, all of them on each rank."""
    config = layer.moe_config
    refused = {
        "expert parallelism": (
            config.moe_parallel_config.use_ep,
            "without --enable-expert-parallel",
        ),
        "LoRA": (config.is_lora_enabled, "without --enable-lora"),
        "experts with biases": (config.has_bias, ""),
        f"the activation {layer.activation.value!r}": (layer.activation != MoEActivation.SILU, ""),
        "a limit of SwiGLU": (
            any(x is not None for x in (layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta)),
            "",
        ),
        "weights of the router on inputs": (layer.apply_router_weight_on_input, ""),
    }
    for what, (asked, remedy) in refused.items():
        if asked:
            or_else = f"{remedy}, or " if remedy else ""
            raise ValueError(
                f"{prefix}: blockscale's experts do not have {what}; serve {or_else}without "
                "quantization='blockscale'"
            )
