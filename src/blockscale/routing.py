"""Tokens to experts and back: which rows an expert has, and what its tokens get of them.

A token's ``top_k`` experts make as many pairs. Sorted by expert, and by token within an expert,
they are the rows of grouped products, whose groups end at ``offsets``. Nothing is read back from
the device, and the order of all sums is that of the experts a token names: the same bits in every
run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import ops, reference
from .ops.operation import needs_gradient
from .tensor_checks import check_is_tensor
from .watching import is_transformed

__all__ = ["INTEGERS", "Routing", "combine", "route", "sizes_of"]

#: Of indices.
INTEGERS = (torch.int64, torch.int32)


class Routing(NamedTuple):
    """The rows of all experts, one expert after the other.

    Attributes:
        pairs: int64 (R,), which pair each row is: ``token * top_k + j``. R is tokens * top_k.
        slots: int64 (tokens, top_k), the row of each pair: the inverse.
        offsets: int32 (experts,), the end of each expert's rows. Rows after the last one are pairs
            of no expert.
        tokens: int32 (R,), the token that each row is of: ``gather`` of
            :func:`blockscale.quantize`.
    """

    pairs: Tensor
    slots: Tensor
    offsets: Tensor
    tokens: Tensor

    @property
    def counts(self) -> Tensor:
        """int32 (experts,), how many rows each expert has."""
        return sizes_of(self.offsets)


def sizes_of(offsets: Tensor) -> Tensor:
    """How many rows each group has, whose ends these are."""
    return offsets.diff(prepend=offsets.new_zeros(1))


def route(experts: Tensor, num_experts: int) -> Routing:
    """The rows that experts have of the tokens that name them: a stable sort, which is a counting
    sort of two launches for up to 1023 experts on a GPU.

    >>> routing = bs.route(torch.tensor([[1, 0], [1, 2]]), 3)
    >>> routing.offsets, routing.tokens
    (tensor([1, 3, 4], dtype=torch.int32), tensor([0, 0, 1, 1], dtype=torch.int32))

    Args:
        experts: int64 or int32 (tokens, top_k), on any device. One that is negative, or
            ``num_experts`` or more, is that of no expert: its row has no product, and gives its
            token nothing, if its weight is finite.
        num_experts: how many there are.

    Raises TypeError or ValueError where these are something else.
    """
    check_is_tensor("experts", experts)
    if experts.dtype not in INTEGERS or experts.dim() != 2:
        raise TypeError(
            f"experts: got {experts.dtype} of shape {tuple(experts.shape)}; expected int64 or "
            "int32 (tokens, top_k): the indices that topk gives"
        )
    if not isinstance(num_experts, int) or isinstance(num_experts, bool) or num_experts < 1:
        raise ValueError(f"num_experts: got {num_experts!r}; expected a positive integer")
    run = reference.route if is_transformed() else ops.route  # an op has no rule for torch.vmap
    return Routing(*run(experts, num_experts))


def combine(
    y: Tensor, slots: Tensor, weights: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """What each token gets: the sum of its rows of ``y`` times ``weights``.

    >>> routing = bs.route(torch.tensor([[1, 0], [1, 2]]), 3)
    >>> bs.combine(torch.ones(4, 8), routing.slots, torch.tensor([[0.5, 0.5], [0.25, 0.5]]))[:, 0]
    tensor([1.0000, 0.7500])

    In fp32 (float64 of float64), each product and each sum rounded, in the order in which a token
    names its experts, and rounded once to ``dtype``: by one kernel on a GPU. Where a gradient is
    asked for, plain torch runs, and autograd keeps what it gathers;
    :func:`blockscale.nn.experts` does not.

    Args:
        y: (R, H), of any floating type.
        slots: (tokens, top_k), as of :class:`Routing`.
        weights: (tokens, top_k), or None for ones.
        dtype: of the result, that of ``y`` by default.

    Raises TypeError or ValueError where these are something else, or do not belong together.
    """
    if isinstance(slots, Routing):
        raise TypeError("slots: got a Routing; pass its slots, routing.slots")
    for name, each in (("y", y), ("slots", slots), ("weights", weights)):
        if each is not None:
            check_is_tensor(name, each)
    if y.dim() != 2 or slots.dim() != 2 or (weights is not None and weights.shape != slots.shape):
        given = None if weights is None else tuple(weights.shape)
        raise ValueError(
            f"y, slots, weights: got {tuple(y.shape)}, {tuple(slots.shape)} and {given}; expected "
            "(R, H), (tokens, top_k) and, if there are weights, (tokens, top_k)"
        )
    if slots.dtype not in INTEGERS:
        raise TypeError(f"slots: got {slots.dtype}; expected int64 or int32, as of Routing")
    if needs_gradient(y, weights):
        return reference.combine(y, slots, weights, dtype)
    return ops.combine(y, slots, weights, dtype or y.dtype)
