"""A mixture of experts: router, experts and shared experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..routing import Routing, route
from .experts import experts
from .gate import Gate
from .gated import SWIGLU, GatedActivation
from .group_checks import check_recipe_of_groups, check_saved_format
from .grouped import reset_as_linear
from .linear import Linear
from .recipe import Recipe
from .reuse import ForgetsWeights
from .router import Router, balancing_loss, choose_experts, mean_scores
from .unscripted import Unscripted

__all__ = ["GatedExperts", "MoE"]


class GatedExperts(ForgetsWeights, Unscripted, torch.nn.Module):
    """Experts that hold their matrices in stacks, with the names that transformers has.

    >>> held = bs.nn.GatedExperts(64, 32, 8)
    >>> routing = bs.route(torch.tensor([[1, 0], [1, 2]]), 8)
    >>> held(torch.randn(2, 64), torch.full((2, 2), 0.5), routing).shape
    torch.Size([2, 64])

    Args:
        hidden_size, intermediate_size, num_experts: H, I and E of ``gate_up_proj`` (E, 2I, H) and
            ``down_proj`` (E, H, I), each matrix initialized as torch.nn.Linear's.
        bias: ``gate_up_proj_bias`` (E, 2I) and ``down_proj_bias`` (E, H), if there are some.
        activation, recipe, saved_format: as of :func:`experts`; :func:`blockscale.convert` changes
            the recipe.
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_proj_bias: Tensor | None
    down_proj_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: GatedActivation = SWIGLU,
        recipe: Recipe | None = Recipe(),  # noqa: B008 - a frozen value
        saved_format: str | None = None,
    ) -> None:
        check_recipe_of_groups(recipe)
        check_saved_format(saved_format)
        super().__init__()
        self.activation, self.recipe, self.saved_format = activation, recipe, saved_format
        for name, out, into in (
            ("gate_up_proj", 2 * intermediate_size, hidden_size),
            ("down_proj", hidden_size, intermediate_size),
        ):
            for key, shape in ((name, (out, into)), (f"{name}_bias", (out,))):
                made = None
                if key == name or bias:
                    empty = torch.empty((num_experts, *shape), device=device, dtype=dtype)
                    made = torch.nn.Parameter(empty)
                self.register_parameter(key, made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_as_linear(self.gate_up_proj, self.gate_up_proj_bias)
        reset_as_linear(self.down_proj, self.down_proj_bias)

    def forward(self, x: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        return experts(
            x,
            weights,
            routing,
            self.gate_up_proj,
            self.down_proj,
            recipe=self.recipe,
            activation=self.activation,
            up_bias=self.gate_up_proj_bias,
            down_bias=self.down_proj_bias,
            saved_format=self.saved_format,
        )

    def extra_repr(self) -> str:
        return f"{tuple(self.gate_up_proj.shape)}, {self.activation}, recipe={self.recipe}"


class SharedExperts(torch.nn.Module):
    """SwiGLU that all tokens go through."""

    def __init__(self, hidden_size: int, size: int, recipe: Recipe | None, **how: Any) -> None:
        super().__init__()
        make = torch.nn.Linear if recipe is None else partial(Linear, recipe=recipe)
        self.gate_proj, self.up_proj = (make(hidden_size, size, False, **how) for _ in range(2))
        self.down_proj = make(size, hidden_size, False, **how)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


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
        saved_format: of what experts keep until the backward, as of :func:`experts`.

    Parameters, with the names that transformers has: ``gate.weight`` (E, H), those of ``experts``,
    which are :class:`GatedExperts`, and of ``shared_experts``: ``gate_proj``, ``up_proj`` and
    ``down_proj``. A buffer ``gate.e_score_correction_bias`` (E,) is added to scores where experts
    are chosen, and changed by :meth:`balance_` alone. :func:`blockscale.convert` changes the
    recipe.

    After a forward ``load`` (E,) has how many pairs each expert had, and in training
    ``mean_scores`` (E,) its mean score, and ``loss`` the balancing loss of both
    (:func:`load_balancing_loss`), all on the device.
    """

    load: Tensor | None
    loss: Tensor | None
    mean_scores: Tensor | None

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
        saved_format: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(router, Router):
            raise TypeError(
                f"router: got {router!r}; expected a blockscale.nn.Router, as in Router(top_k=2)"
            )
        router.check(num_experts)
        how: Any = {"device": device, "dtype": dtype}
        self.router, self.num_experts = router, num_experts
        self.gate = Gate(hidden_size, num_experts, **how)
        self.experts = GatedExperts(
            hidden_size,
            intermediate_size,
            num_experts,
            bias,
            activation=activation,
            recipe=recipe,
            saved_format=saved_format,
            **how,
        )
        self.shared_experts = None
        if shared_size:
            self.shared_experts = SharedExperts(hidden_size, shared_size, recipe, **how)
        self.load = self.loss = self.mean_scores = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.gate.weight.shape[1]
        if not x.dim() or x.shape[-1] != hidden:
            raise ValueError(f"x: has shape {tuple(x.shape)}; expected (..., {hidden})")
        if not x.is_floating_point():
            raise TypeError(f"x: got {x.dtype}; expected a floating type, as that of the weights")
        rows = x.reshape(-1, x.shape[-1])
        bias = self.gate.e_score_correction_bias
        weights, chosen, scores = choose_experts(self.gate(rows), self.router, bias)
        routing = route(chosen, self.num_experts)
        self.load = routing.counts
        self.mean_scores = mean_scores(scores) if self.training else None
        self.loss = self.balancing_loss(self.load) if self.training else None
        y = self.experts(rows, weights, routing)
        if self.shared_experts is not None:
            y = y + self.shared_experts(rows)
        return y if x.dim() == 2 else y.reshape(x.shape)  # FSDP warns of views

    def balancing_loss(self, load: Tensor) -> Tensor:
        """The balancing loss of the last forward's tokens, by the ``load`` (E,) of more than these:
        with micro-batches or ranks add theirs up. Of those that have as many tokens its mean is the
        loss of all, with the gradient of that.

        >>> moe = bs.nn.MoE(64, 32, 8, bs.nn.Router(top_k=2))
        >>> y = moe(torch.randn(10, 64))
        >>> loss = moe.balancing_loss(moe.load)  # with ranks after dist.all_reduce(moe.load)

        Raises RuntimeError where no forward has been run in training.

        Source: Qiu et al., "Demons in the Detail", arXiv 2501.11873.
        """
        if self.mean_scores is None:
            raise RuntimeError(
                "balancing_loss: the last forward was not one of training; call module.train(), "
                "and the module, before"
            )
        return balancing_loss(load, self.mean_scores)

    @torch.no_grad()
    def balance_(self, rate: float = 1e-3, load: Tensor | None = None) -> None:
        """Make experts that had fewer pairs than the mean more likely, and others less, by
        ``rate``; for after an optimizer step. ``load`` (E,) is that of the last forward by default:
        with micro-batches or ranks add theirs up, so that all ranks change alike.

        Source: Wang et al., "Auxiliary-Loss-Free Load Balancing", arXiv 2408.15664.
        """
        load = self.load if load is None else load
        if load is None:
            raise RuntimeError("balance_: no forward has been run, there is no load")
        load = load.float()
        bias = self.gate.e_score_correction_bias
        bias.add_((load.mean() - load).sign(), alpha=rate)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and saved: not what the last forward left."""
        return {**self.__dict__, "load": None, "loss": None, "mean_scores": None}

    def extra_repr(self) -> str:
        return f"{self.router}"
