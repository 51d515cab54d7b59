"""vLLM's methods of experts whose weights are quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import FusedMoeWeightScaleSupported
from vllm.model_executor.utils import set_weight_attrs

from ..nn.gated import SWIGLU, GatedActivation
from .device import check_device
from .limits import check_experts
from .served import ServedExperts
from .weight_module import take
from .weights import Kind, Slot, assemble_experts

if TYPE_CHECKING:
    from .config import BlockscaleConfig

__all__ = ["BlockscaleMoEMethod", "GptOssMoEMethod"]

_Loader = Callable[..., bool | None]


class BlockscaleMoEMethod(FusedMoEMethodBase):
    """Parameters stacked as vLLM does, until the checkpoint is read; then ``layer.served``."""

    activation = SWIGLU
    of_vllm = "silu"
    has_bias = False

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
        check_experts(layer, self.of_vllm, self.has_bias, self.prefix)
        sizes = {
            "w13": (2 * intermediate_size_per_partition, hidden_size),
            "w2": (hidden_size, intermediate_size_per_partition),
        }
        for stack, (rows, k) in sizes.items():
            for slot in self.kind.slots(k, f"{self.prefix}.{stack}"):
                if slot.columns is None:
                    shape: tuple[int, ...] = (num_experts, 2)[: 1 + (stack == "w13")]
                else:
                    shape = num_experts, rows, slot.columns
                data = torch.empty(shape, dtype=slot.dtype)
                check_device(data.device, self.recipe, self.prefix, groups=True)
                self.kind.poison(slot.part, data)
                name = f"{stack}_{self.names[slot.part]}"
                self._register(layer, name, data, self._attributes(layer, slot, extra_weight_attrs))
            if self.has_bias:
                bias = torch.full((num_experts, rows), torch.nan, dtype=params_dtype)
                self._register(layer, f"{stack}_bias", bias, {"weight_loader": _copy})

    def _register(self, layer: Any, name: str, data: Tensor, attributes: dict[str, Any]) -> None:
        parameter = torch.nn.Parameter(data, requires_grad=False)
        layer.register_parameter(name, parameter)
        set_weight_attrs(parameter, attributes)

    @property
    def names(self) -> Mapping[str, str]:
        """Part -> how its parameters' names end."""
        return self.kind.names

    def _attributes(self, layer: Any, slot: Slot, given: Mapping[str, Any]) -> dict[str, Any]:
        """What vLLM's loaders ask a parameter for."""
        if slot.columns is None:
            return {**given, "weight_loader": _load_number(layer)}
        return {**given, "quant_method": FusedMoeWeightScaleSupported.GROUP.value}

    def process_weights_after_loading(self, layer: Any) -> None:
        self.config.check_claimed()
        up, down = (
            {part: take(layer, f"{stack}_{name}") for part, name in self.names.items()}
            for stack in ("w13", "w2")
        )
        biases = [take(layer, f"{stack}_bias") for stack in ("w13", "w2") if self.has_bias]
        if any(each.isnan().any() for each in biases):
            raise ValueError(
                f"{self.prefix}: its biases were not read from the checkpoint, all of them, or "
                "have NaN in them; fetch the checkpoint again, or serve it without "
                "quantization='blockscale'"
            )
        experts = assemble_experts(self.kind, up, down, self.prefix)
        layer.served = ServedExperts(experts, self.recipe, self.activation, *biases)

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


class GptOssMoEMethod(BlockscaleMoEMethod):
    """Experts of gpt-oss: its loader has stacks of all of them, rows of gate and up alternate."""

    activation = GatedActivation(alpha=1.702, limit=7.0, shift=1.0, interleaved=True)
    of_vllm = "swigluoai"
    has_bias = True

    @property
    def names(self) -> Mapping[str, str]:
        """As its loader calls them."""
        return {"data": "weight", "scale": "weight_scale"}

    def _attributes(self, layer: Any, slot: Slot, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"weight_loader": _copy}


def _copy(param: torch.nn.Parameter, loaded_weight: Tensor, **_: Any) -> None:
    """Load this rank's part of all experts."""
    if param.shape != loaded_weight.shape:
        raise ValueError(
            f"a stack of experts is {tuple(loaded_weight.shape)} in the checkpoint, and "
            f"{tuple(param.shape)} in the model; choose another tensor_parallel_size"
        )
    param.data.copy_(loaded_weight)


def _load_number(layer: Any) -> _Loader:
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
