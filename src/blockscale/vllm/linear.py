"""vLLM's method of linear layers whose weights are quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    GroupQuantScaleParameter,
    PerTensorScaleParameter,
)
from vllm.model_executor.utils import set_weight_attrs

from .device import check_device
from .served import ServedLinear
from .weight_module import take
from .weights import Kind, Slot, assemble

if TYPE_CHECKING:
    from .config import BlockscaleConfig

__all__ = ["BlockscaleLinearMethod"]


@register_weight_loader_v2_supported_method
class BlockscaleLinearMethod(LinearMethodBase):
    """Parameters as the checkpoint has them, until it is read; then ``layer.served``.

    Weights that vLLM fuses (q, k and v) are one product; where their global scales differ each is
    one of its own, by its own scale.
    """

    def __init__(self, config: BlockscaleConfig, kind: Kind, prefix: str) -> None:
        self.config, self.kind, self.prefix = config, kind, prefix
        self.recipe = config.recipe(kind, prefix)

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        layer.output_partition_sizes = output_partition_sizes
        loader = extra_weight_attrs.pop("weight_loader")
        for slot in self.kind.slots(input_size_per_partition, self.prefix):
            parameter = _parameter(slot, output_partition_sizes, loader)
            check_device(parameter.device, self.recipe, self.prefix)
            self.kind.poison(slot.part, parameter.data)
            layer.register_parameter(slot.name, parameter)
            set_weight_attrs(parameter, extra_weight_attrs)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.config.check_claimed()
        taken = {part: take(layer, name) for part, name in self.kind.names.items()}
        weights = assemble(self.kind, taken, layer.output_partition_sizes, self.prefix)
        layer.served = torch.nn.ModuleList(ServedLinear(each, self.recipe) for each in weights)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(layer.served) == 1:
            return layer.served[0](x, bias)
        sizes = [each.shape[0] for each in layer.served]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        return torch.cat([f(x, b) for f, b in zip(layer.served, biases, strict=True)], -1)


def _parameter(slot: Slot, rows: list[int], loader: Any) -> BasevLLMParameter:
    if slot.columns is None:
        data = torch.empty(len(rows), dtype=slot.dtype)
        return PerTensorScaleParameter(data=data, weight_loader=loader)
    data = torch.empty(sum(rows), slot.columns, dtype=slot.dtype)
    how = {"input_dim": 1, "output_dim": 0, "weight_loader": loader}
    return GroupQuantScaleParameter(data=data, **how)
