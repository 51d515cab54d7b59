"""A mixture of experts: router, experts and shared experts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..routing import route
from .experts import experts
from .gated import SWIGLU, GatedActivation
from .group_checks import check_recipe_of_groups
from .linear import linear
from .recipe import Recipe
from .reuse import forget_weights
from .router import Router, balancing_loss, choose_experts
from .unscripted import Unscripted

__all__ = ["MoE"]


class MoE(Unscripted, torch.nn.Module):
    """``sum_j weight_j * expert_j(x)`` of the experts that a router chooses for each token.

    >>> moe = bs.nn.MoE(64, 32, 8, bs.nn.Router(top_k=2), recipe=bs.Recipe("mxfp8"))
    >>> moe(torch.randn(4, 10, 64)).shape
    torch.Size([4, 10, 64])

    Args:
        hidden_size, intermediate_size, num_experts: H, I and E. An expert is ``activation(x @
            up.T) @ down.T``.
        router: how experts are chosen.
        shared_size: I of experts that all tokens go to, which are one; 0: there is none.
        activation: of the experts; shared ones have SwiGLU.
        bias: experts have biases.
        recipe: of the products of experts; None: not quantized. The router never is.

    Parameters, with the names that transformers has: ``gate.weight`` (E, H),
    ``experts.gate_up_proj`` (E, 2I, H), ``experts.down_proj`` (E, H, I), their biases
    ``experts.gate_up_proj_bias`` and ``experts.down_proj_bias``, and those of
    ``shared_experts``. A buffer ``gate.e_score_correction_bias`` (E,) is added to scores where
    experts are chosen, and changed by :meth:`balance_` alone.

    After a forward ``load`` (E,) has how many pairs each expert had, and in training ``loss`` the
    balancing loss, both on the device.
    """

    load: Tensor | None
    loss: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        router: Router,
        *,
        shared_size: int = 0,
        activation: GatedActivation = SWIGLU,
        bias: bool = False,
        recipe: Recipe | None = Recipe(),  # noqa: B008 - a frozen value
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        router.check(num_experts)
        check_recipe_of_groups(recipe)
        how: Any = {"device": device, "dtype": dtype}
        self.router, self.activation, self.recipe = router, activation, recipe
        self.num_experts = num_experts
        self.gate = torch.nn.Linear(hidden_size, num_experts, bias=False, **how)
        self.gate.register_buffer(
            "e_score_correction_bias", torch.zeros(num_experts, device=device, dtype=torch.float32)
        )
        self.experts = torch.nn.ParameterDict(
            _stacks(num_experts, hidden_size, intermediate_size, bias, how)
        )
        self.shared_experts = None
        if shared_size:
            shared = _stacks(1, hidden_size, shared_size, False, how)
            self.shared_experts = torch.nn.ParameterDict(
                {name: torch.nn.Parameter(each.data[0]) for name, each in shared.items()}
            )
        self.load = self.loss = None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        logits = torch.nn.functional.linear(rows, self.gate.weight)
        bias: Any = self.gate.e_score_correction_bias
        weights, chosen, scores = choose_experts(logits, self.router, bias)
        routing = route(chosen, self.num_experts)
        self.load = routing.offsets.diff(prepend=routing.offsets.new_zeros(1))
        self.loss = balancing_loss(scores, chosen) if self.training else None
        held = self.experts
        y = experts(
            rows,
            weights,
            routing,
            held["gate_up_proj"],
            held["down_proj"],
            recipe=self.recipe,
            activation=self.activation,
            up_bias=held.get("gate_up_proj_bias"),
            down_bias=held.get("down_proj_bias"),
        )
        if self.shared_experts is not None:
            y = y + self._shared(rows)
        return y.reshape(x.shape)

    @torch.no_grad()
    def balance_(self, rate: float = 1e-3) -> None:
        """Make experts that had fewer pairs than the mean in the last forward more likely, and
        others less, by ``rate``; for after an optimizer step.

        Source: Wang et al., "Auxiliary-Loss-Free Load Balancing", arXiv 2408.15664.
        """
        if self.load is None:
            raise RuntimeError("balance_: no forward has been run, there is no load")
        load = self.load.float()
        bias: Any = self.gate.e_score_correction_bias
        bias.add_((load.mean() - load).sign(), alpha=rate)

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared_experts is not None
        up, down = (self.shared_experts[name] for name in ("gate_up_proj", "down_proj"))
        return self._linear(_swiglu(self._linear(x, up)), down)

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.recipe is None:
            return torch.nn.functional.linear(x, weight)
        return linear(x, weight, recipe=self.recipe)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        forget_weights()
        super()._load_from_state_dict(*args, **kwargs)
        forget_weights()

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and saved: not what the last forward left."""
        return {**self.__dict__, "load": None, "loss": None}

    def extra_repr(self) -> str:
        shape = tuple(self.experts["gate_up_proj"].shape)
        return f"experts={shape}, {self.router}, recipe={self.recipe}"


def _swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _stacks(
    count: int, hidden: int, intermediate: int, bias: bool, how: Any
) -> dict[str, torch.nn.Parameter]:
    """Parameters of experts, each initialized as torch.nn.Linear's."""
    made = {}
    for name, out, into in (
        ("gate_up_proj", 2 * intermediate, hidden),
        ("down_proj", hidden, intermediate),
    ):
        bound = 1 / math.sqrt(into)
        shapes: dict[str, tuple[int, ...]] = {name: (count, out, into)}
        if bias:
            shapes[f"{name}_bias"] = (count, out)
        for key, shape in shapes.items():
            data = torch.empty(shape, **how)
            made[key] = torch.nn.Parameter(data.uniform_(-bound, bound))
    return made
