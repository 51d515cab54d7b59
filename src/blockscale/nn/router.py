"""Which experts a token goes to, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Router", "balancing_loss", "choose_experts"]

_SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Router:
    """How a token's experts follow from its logits.

    >>> bs.nn.Router(top_k=8)  # Qwen3-MoE, Mixtral
    >>> bs.nn.Router(top_k=8, scores="sigmoid", groups=8, top_groups=4, scale=2.5)  # DeepSeek-V3
    >>> bs.nn.Router(top_k=4, after=True)  # gpt-oss: softmax of the logits that are taken

    Args:
        top_k: experts of a token.
        scores: "softmax" over all experts, or "sigmoid" of each logit.
        normalize: weights are divided by their sum.
        groups, top_groups: experts are in as many groups of equal size, side by side; those of the
            ``top_groups`` alone are taken whose two best scores have the largest sums.
        scale: weights are multiplied by it in the end.
        after: softmax over the logits of the experts that were taken, instead of over all.
    """

    top_k: int
    scores: str = "softmax"
    normalize: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    after: bool = False

    def __post_init__(self) -> None:
        if self.scores not in _SCORES:
            raise ValueError(f"scores: got {self.scores!r}; choose one of {', '.join(_SCORES)}")
        for name in ("top_k", "groups", "top_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; expected 1 or more")
        if self.top_groups > self.groups:
            raise ValueError(f"top_groups: got {self.top_groups}; there are {self.groups} groups")

    def check(self, num_experts: int) -> None:
        """ValueError unless so many experts can be chosen from."""
        if num_experts % self.groups:
            raise ValueError(
                f"groups: got {self.groups}; {num_experts} experts are no multiple of it"
            )
        most = num_experts // self.groups * self.top_groups
        if self.top_k > most:
            raise ValueError(
                f"top_k: got {self.top_k}; there are {most} experts to choose from"
                + (f", in {self.top_groups} of {self.groups} groups" if self.groups > 1 else "")
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
    """
    num_experts = logits.shape[-1]
    router.check(num_experts)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    looked_at = logits.device.type == "cpu" and not torch.compiler.is_compiling()
    if looked_at and bool(logits.isnan().any()):
        where = int(logits.isnan().any(-1).nonzero()[0])
        raise ValueError(f"logits: token {where} has NaN; no expert can be chosen for it")
    scores = logits.sigmoid() if router.scores == "sigmoid" else logits.softmax(-1)
    ranked = (logits if router.after else scores).detach()
    if bias is not None:
        ranked = ranked + bias
    if router.groups > 1:
        grouped = ranked.unflatten(-1, (router.groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        taken = torch.zeros_like(best, dtype=torch.bool)
        taken.scatter_(-1, _first(best, router.top_groups), True)
        ranked = grouped.masked_fill(~taken[..., None], -torch.inf).flatten(-2)
    experts = _first(ranked, router.top_k)
    weights = (logits if router.after else scores).gather(-1, experts)
    if router.after:
        weights = weights.softmax(-1)
    elif router.normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
    weights = torch.where(logits.isnan().any(-1, keepdim=True), torch.nan, weights * router.scale)
    return weights, experts, scores


def balancing_loss(scores: Tensor, experts: Tensor) -> Tensor:
    """``E * sum_e f_e p_e``: f the share of pairs that an expert has, p its mean score; 1 where all
    are alike.

    >>> weights, experts, scores = bs.nn.choose_experts(torch.zeros(6, 8), bs.nn.Router(top_k=2))
    >>> bs.nn.balancing_loss(scores, experts)
    tensor(1.)

    Source: Fedus et al., "Switch Transformers", JMLR 2022, section 2.2; with f over all top-k
    pairs, as in the models of transformers, whose loss is this times top_k.
    """
    num_experts = scores.shape[-1]
    share = torch.zeros(num_experts, dtype=scores.dtype, device=scores.device)
    ones = torch.ones_like(experts, dtype=scores.dtype).flatten()
    share = share.scatter_add(0, experts.flatten(), ones) / max(experts.numel(), 1)
    mean = (scores / scores.sum(-1, keepdim=True)).mean(0) if len(scores) else scores.sum(0)
    return num_experts * (share * mean).sum()


def _first(x: Tensor, count: int) -> Tensor:
    """The positions of the largest ones, of equal ones the first, in falling order."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :count]
