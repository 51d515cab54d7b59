"""Which experts a token goes to, and with which weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import choose
from ..tensor_checks import check_is_tensor
from ..watching import is_transformed

__all__ = ["Router", "balancing_loss", "choose_experts", "load_balancing_loss", "mean_scores"]

_SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Router:
    """How a token's experts follow from its logits.

    >>> qwen3 = bs.nn.Router(top_k=8)  # Mixtral likewise
    >>> deepseek_v3 = bs.nn.Router(
    ...     top_k=8,
    ...     score_function="sigmoid",
    ...     n_group=8,
    ...     topk_group=4,
    ...     routed_scaling_factor=2.5,
    ... )
    >>> gpt_oss = bs.nn.Router(top_k=4, pre_softmax=False)

    Args:
        top_k: experts of a token.
        score_function: "softmax" over all experts, or "sigmoid" of each logit.
        norm_topk_prob: weights are divided by their sum.
        n_group, topk_group: experts are in ``n_group`` groups of equal size, side by side; those of
            the ``topk_group`` alone are taken whose two best scores have the largest sums.
        routed_scaling_factor: weights are multiplied by it in the end.
        pre_softmax: softmax over all experts; else over the logits of those that were taken.

    Raises ValueError for what is not there, or does not go together.
    """

    top_k: int
    score_function: str = "softmax"
    norm_topk_prob: bool = True
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    pre_softmax: bool = True

    def __post_init__(self) -> None:
        choose("score_function", self.score_function, dict.fromkeys(_SCORES))
        if not self.pre_softmax and self.score_function != "softmax":
            raise ValueError(
                f"pre_softmax: got False with {self.score_function!r} scores; it is about softmax"
            )
        for name in ("top_k", "n_group", "topk_group"):
            given = getattr(self, name)
            if not isinstance(given, int) or isinstance(given, bool):
                raise TypeError(f"{name}: got {given!r}; expected an integer")
            if given < 1:
                raise ValueError(f"{name}: got {given}; expected 1 or more")
        if not math.isfinite(self.routed_scaling_factor):
            raise ValueError(
                f"routed_scaling_factor: got {self.routed_scaling_factor}; expected a finite number"
            )
        if self.topk_group > self.n_group:
            raise ValueError(f"topk_group: got {self.topk_group}; there are {self.n_group} groups")

    def check(self, num_experts: int) -> None:
        """ValueError unless so many experts can be chosen from."""
        if num_experts % self.n_group:
            raise ValueError(
                f"n_group: got {self.n_group}; {num_experts} experts are no multiple of it"
            )
        most = num_experts // self.n_group * self.topk_group
        if self.top_k > most:
            raise ValueError(
                f"top_k: got {self.top_k}; there are {most} experts to choose from"
                + (f", in {self.topk_group} of {self.n_group} groups" if self.n_group > 1 else "")
            )


def choose_experts(
    logits: Tensor, router: Router, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and experts of each token, and the scores of all experts.

    >>> weights, experts, scores = bs.nn.choose_experts(torch.randn(6, 8), bs.nn.Router(top_k=2))

    Args:
        logits: (tokens, experts), in any floating type. Scores are computed in fp32 (in float64 of
            float64).
        bias: (experts,), added to scores when experts are chosen, and not to weights: DeepSeek-V3's
            balancing without a loss.

    Returns (tokens, top_k) floating and int64, and (tokens, experts). Of equal scores that expert
    comes first which has the lower number. A token with a NaN among its logits has NaN weights, so
    that what it gets is NaN; on a CPU it is a ValueError.

    Raises TypeError or ValueError where ``logits``, ``bias`` and ``router`` do not fit.
    """
    check_is_tensor("logits", logits)
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits: got {logits.dtype} of shape {tuple(logits.shape)}; expected floating numbers "
            "(tokens, experts)"
        )
    num_experts = logits.shape[-1]
    if bias is not None and tuple(bias.shape) != (num_experts,):
        raise ValueError(f"bias: has shape {tuple(bias.shape)}; expected ({num_experts},)")
    router.check(num_experts)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    looked_at = logits.device.type == "cpu" and not torch.compiler.is_compiling()
    looked_at = looked_at and not is_transformed()
    if looked_at and bool(logits.isnan().any()):
        where = int(logits.isnan().any(-1).nonzero()[0])
        raise ValueError(f"logits: token {where} has NaN; no expert can be chosen for it")
    scores = logits.sigmoid() if router.score_function == "sigmoid" else logits.softmax(-1)
    ranked = (scores if router.pre_softmax else logits).detach()
    if bias is not None:
        ranked = ranked + bias
    if router.n_group > 1:
        grouped = ranked.unflatten(-1, (router.n_group, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        taken = torch.zeros_like(best, dtype=torch.bool)
        taken.scatter_(-1, _first(best, router.topk_group), True)
        ranked = grouped.masked_fill(~taken[..., None], -torch.inf).flatten(-2)
    experts = _first(ranked, router.top_k)
    weights = (scores if router.pre_softmax else logits).gather(-1, experts)
    if not router.pre_softmax:
        weights = weights.softmax(-1)
    elif router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
    weights = torch.where(
        logits.isnan().any(-1, keepdim=True), torch.nan, weights * router.routed_scaling_factor
    )
    return weights, experts, scores


def load_balancing_loss(scores: Tensor, experts: Tensor) -> Tensor:
    """``E * sum_e f_e p_e``: f the share of pairs that an expert has, p its mean score; 1 where all
    are alike.

    >>> weights, experts, scores = bs.nn.choose_experts(torch.zeros(6, 8), bs.nn.Router(top_k=2))
    >>> bs.nn.load_balancing_loss(scores, experts)
    tensor(1.)

    Source: Fedus et al., "Switch Transformers", JMLR 2022, section 2.2; with f over all top-k
    pairs, as in the models of transformers, whose loss is this times top_k.
    """
    load = torch.zeros(scores.shape[-1], dtype=scores.dtype, device=scores.device)
    ones = torch.ones_like(experts, dtype=scores.dtype).flatten()
    return balancing_loss(load.scatter_add(0, experts.flatten(), ones), mean_scores(scores))


def mean_scores(scores: Tensor) -> Tensor:
    """The mean score of each expert, of ``scores`` (tokens, experts) that add up to one in each
    token first."""
    if not len(scores):
        return scores.sum(0)
    return (scores / scores.sum(-1, keepdim=True)).mean(0)


def balancing_loss(load: Tensor, means: Tensor) -> Tensor:
    """``load_balancing_loss`` of how many pairs each expert has, and its mean score."""
    share = load.to(means.dtype) / load.sum().clamp(min=1)
    return len(load) * (share * means).sum()


def _first(x: Tensor, count: int) -> Tensor:
    """The positions of the largest ones, of equal ones the first, in falling order."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :count]
