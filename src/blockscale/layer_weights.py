"""Weights of a model that products are made of, by name: of linear layers, and of each expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .formats import Format
from .fused_names import fused_with
from .measure import amax
from .nn.exclude import default_exclusions
from .nn.hf_experts import is_experts
from .rounding import global_scale_from_amax
from .tensor import ScaledTensor
from .tensor_checks import DTYPES

__all__ = ["global_scales", "layer_weights"]

#: Stacks of experts, and what each of their matrices is made of.
_PARTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}


def layer_weights(
    model: torch.nn.Module,
    format: Format,
    filter_fn: Callable[[torch.nn.Module, str], bool] | None = None,
) -> dict[str, Tensor]:
    """Matrices (N, K) that can be quantized to ``format``, by the names of their layers.

    Those of experts, which transformers holds in stacks, are views of them, by the names that each
    expert has in files: ``"...experts.3.gate_proj"``. ``filter_fn`` is called with a module and
    such a name; None: all but :data:`blockscale.nn.DEFAULT_EXCLUDE`.
    """
    takes = filter_fn
    if takes is None:
        why_not = default_exclusions(model)
        takes = lambda module, name: not why_not(module, name)  # noqa: E731
    return {
        layer: weight
        for name, module in model.named_modules()
        for layer, weight in _matrices(name, module)
        if weight.shape[1] % format.block_size == 0 and takes(module, layer)
    }


def _matrices(name: str, module: Any) -> Iterator[tuple[str, Tensor]]:
    own = {n: p for n, p in module.named_parameters(recurse=False) if _has_values(p)}
    if isinstance(module, torch.nn.Linear):
        if "weight" in own:  # else it is computed from others
            yield name, own["weight"]
    elif is_experts(module) and not module.is_transposed and module.is_concatenated:
        for stack, parts in _PARTS.items():
            for expert, matrix in enumerate(own[stack].detach() if stack in own else ()):
                for part, piece in zip(parts, matrix.chunk(len(parts)), strict=True):
                    yield f"{name}.{expert}.{part}", piece


def _has_values(weight: Tensor) -> bool:
    """Whether there are some, and they can be rounded."""
    return (
        not torch.nn.parameter.is_lazy(weight)
        and not isinstance(weight, ScaledTensor)
        and weight.dtype in DTYPES
        and weight.numel() > 0
    )


def global_scales(
    weights: Mapping[str, Tensor],
    format: Format,
    scaling: str = "amax",
    *,
    power_of_two: bool = False,
) -> dict[str, Tensor]:
    """The global scale of each weight; those that servers fuse share one. Empty for formats that
    have none."""
    if not format.has_global_scale:
        return {}
    largest = {name: amax(weight) for name, weight in weights.items()}
    scales = {}
    for name in weights:
        group = [largest[each] for each in fused_with(name) if each in largest]
        scales[name] = global_scale_from_amax(
            torch.stack(group).amax(), format, scaling, power_of_two=power_of_two
        )
    return scales
