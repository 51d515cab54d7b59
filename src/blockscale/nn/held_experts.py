"""Layers of experts that hold their stacks quantized."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ..routing import Routing
from .hf_activation import INPUT_SCALES
from .hf_experts import Steps, find_activation, run_experts, stack_names
from .holds import HoldsQuantized
from .quantized_experts import quantized_experts, quantized_grouped_linear

__all__ = ["QuantizedExperts", "QuantizedGatedExperts"]

_HELD = Steps(quantized_experts, quantized_grouped_linear)


class QuantizedExperts(HoldsQuantized):
    """Experts of transformers that hold their stacks quantized; made by
    :func:`blockscale.quantize_`.

    ``gate_up_proj`` (``up_proj`` where there is no gate) and ``down_proj`` are parameters without
    gradients, of the shapes that they had: each is a :class:`~blockscale.ScaledTensor`, blocked
    along what products contract, which has a global scale for each expert where its format has one.
    ``up_input_scale`` and ``down_input_scale`` are buffers, None unless a folder was calibrated.
    state_dict, load_state_dict, ``.to(device)``, copies and pickles take them as a whole.
    """

    @staticmethod
    def held(module: Any) -> Mapping[str, int]:
        return dict.fromkeys(stack_names(module), -2 if module.is_transposed else -1)

    def _begin_holding(self) -> None:
        for name in INPUT_SCALES:
            self.register_buffer(name, None, persistent=False)
        super()._begin_holding()
        find_activation(self)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        steps = _HELD
        if self.up_input_scale is not None:
            scales: Any = {name: getattr(self, name) for name in INPUT_SCALES}
            steps = steps._replace(experts=partial(quantized_experts, **scales))
        return run_experts(self, hidden_states, top_k_index, top_k_weights, self.recipe, steps)


class QuantizedGatedExperts(HoldsQuantized):
    """The same of :class:`blockscale.nn.GatedExperts`."""

    @staticmethod
    def held(module: Any) -> Mapping[str, int]:
        return {"gate_up_proj": -1, "down_proj": -1}

    def forward(self, x: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        module: Any = self
        return quantized_experts(
            x,
            weights,
            routing,
            module.gate_up_proj,
            module.down_proj,
            recipe=self.recipe,
            activation=module.activation,
            up_bias=module.gate_up_proj_bias,
            down_bias=module.down_proj_bias,
        )

    def extra_repr(self) -> str:
        module: Any = self
        return f"{module.gate_up_proj}, {module.activation}, recipe={self.recipe}"
