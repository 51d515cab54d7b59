"""Attention of torch.nn under a recipe, and the fused paths of its encoder that must be off."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .autocast import autocast
from .recipe import Recipe
from .unscripted import Unscripted

__all__ = ["MultiheadAttention", "set_fast_paths"]


class MultiheadAttention(Unscripted, torch.nn.MultiheadAttention):
    """torch.nn.MultiheadAttention whose projections are block-scaled; made by :func:`convert`.

    >>> attention = bs.convert(torch.nn.MultiheadAttention(512, 8), bs.Recipe("mxfp8"))

    The products of queries, keys and values stay as they are, and so do parameters, their names
    and the state_dict. Training and evaluation give the same numbers: the fused path for
    evaluation, which takes the weights as they are, is not taken.
    """

    recipe: Recipe

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        with autocast(self.recipe):
            return super().forward(*args, **kwargs)

    def extra_repr(self) -> str:
        return f"recipe={self.recipe}"


#: Of modules that may skip their layers' forward for one fused operation on raw weights: the
#: attribute that allows it, and what forbids it.
_FAST_PATHS = (
    (torch.nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (torch.nn.TransformerEncoder, "use_nested_tensor", False),
)
_KEPT = "_blockscale_fast_path"


def set_fast_paths(model: torch.nn.Module, ours: tuple[type, ...]) -> None:
    """Forbid the fused paths around layers of ours; allow them again where none is left."""
    for module in model.modules():
        for kind, attribute, off in _FAST_PATHS:
            if not isinstance(module, kind):
                continue
            forbid = any(isinstance(each, ours) for each in module.modules())
            if forbid and _KEPT not in module.__dict__:
                setattr(module, _KEPT, getattr(module, attribute, off))
                setattr(module, attribute, off)
            elif not forbid and _KEPT in module.__dict__:
                setattr(module, attribute, module.__dict__.pop(_KEPT))
