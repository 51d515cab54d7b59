"""Gradients that cannot be differentiated again say so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..watching import is_transformed

__all__ = ["refuse_double_backward"]

Gradients = tuple[Tensor | None, ...]

_SENTENCE = (
    "the gradients of a block-scaled layer cannot be differentiated again (create_graph=True, "
    "gradient penalties, Hessians): leave its layers in torch.nn by filter_fn, or differentiate "
    "once, without create_graph"
)


def refuse_double_backward(gradients: Gradients, *sources: Tensor) -> Gradients:
    """The gradients, which depend on ``sources``. Differentiating them is an error, never silence.

    torch's once_differentiable lets gradients pass as constants where the incoming one is constant,
    as that of a sum is, and as unused where somebody asks for one input: their derivatives would be
    dropped. So ``create_graph=True`` is refused at once. torch.func always records, and there an
    anchor ties the gradients to their sources.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return gradients
    if not is_transformed():
        raise NotImplementedError(_SENTENCE)
    anchor = torch.stack([x.flatten()[:0].sum(dtype=torch.float32) for x in sources])
    made = iter(_Refuse.apply(anchor, *(g for g in gradients if g is not None)))
    return tuple(None if g is None else next(made) for g in gradients)


class _Refuse(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(anchor: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(g.view_as(g) for g in gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Any:
        raise NotImplementedError(_SENTENCE)
