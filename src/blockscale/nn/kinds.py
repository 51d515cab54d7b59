"""The layers that can be converted, and what each becomes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import titan_experts
from .attention import MultiheadAttention
from .class_change import _new  # noqa: F401 - where files of whole models that are older look
from .conv1d import Conv1D
from .grouped import GroupedLinear
from .held_experts import QuantizedExperts, QuantizedGatedExperts
from .hf_experts import Experts, is_experts
from .holds import HoldsQuantized
from .linear import Linear
from .moe import GatedExperts
from .parametrized import parameters_of, sources_of
from .quantized import QuantizedConv1D, QuantizedLinear
from .titan_experts import TitanExperts

__all__ = [
    "CONVERTED",
    "GROUPED",
    "OWN",
    "QUANTIZED",
    "QUANTIZED_STACKS",
    "Kind",
    "kind_of",
    "unknown",
]


class Kind(NamedTuple):
    """A layer as ``convert`` makes it, and as ``quantize_`` does (None: it does not)."""

    converted: type[torch.nn.Module]
    quantized: type[HoldsQuantized] | None


_LINEAR = Kind(Linear, QuantizedLinear)
_CONV1D = Kind(Conv1D, QuantizedConv1D)
_ATTENTION = Kind(MultiheadAttention, None)
_EXPERTS = Kind(Experts, QuantizedExperts)
_TITAN = Kind(TitanExperts, None)
_GATED = Kind(GatedExperts, QuantizedGatedExperts)

#: Of the class that defines ``forward``.
_KINDS = {
    torch.nn.Linear: _LINEAR,
    Linear: _LINEAR,
    QuantizedLinear: _LINEAR,
    Conv1D: _CONV1D,
    QuantizedConv1D: _CONV1D,
    torch.nn.MultiheadAttention: _ATTENTION,
    MultiheadAttention: _ATTENTION,
    Experts: _EXPERTS,
    QuantizedExperts: _EXPERTS,
    TitanExperts: _TITAN,
    GatedExperts: _GATED,
    QuantizedGatedExperts: _GATED,
    GroupedLinear: Kind(GroupedLinear, None),
}

#: Made with a recipe of their own, which ``convert`` changes, and gives back.
OWN = (GatedExperts, GroupedLinear)
#: Whose rows are grouped, which not every recipe can.
GROUPED = (Experts, TitanExperts, *OWN)
CONVERTED = (Linear, Conv1D, MultiheadAttention, *GROUPED)
#: Of stacks of matrices.
QUANTIZED_STACKS = (QuantizedExperts, QuantizedGatedExperts)
QUANTIZED = (QuantizedLinear, QuantizedConv1D, *QUANTIZED_STACKS)

_CONVOLUTIONS = torch.nn.modules.conv._ConvNd
_FUSED = (torch.nn.RNNBase, torch.nn.RNNCellBase)


def kind_of(module: torch.nn.Module) -> Kind | str | None:
    """What a module with matrices of its own can become; why nothing, otherwise.

    None: it is nothing that is known here; see :func:`unknown`.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return "compiled by torch.jit, it cannot be changed any more: convert before"
    definer = next(cls for cls in type(module).__mro__ if "forward" in cls.__dict__)
    kind = _KINDS.get(definer) or (_CONV1D if _is_conv1d(module, definer) else None)
    if "forward" in module.__dict__:
        return "its forward was replaced by another (accelerate's hooks do that): convert before"
    if kind is None and is_experts(module):
        kind = _EXPERTS
    if kind is None:
        found = titan_experts.recognize(module, definer)
        if isinstance(found, str):
            return found
        kind = _TITAN if found else None
    if kind is not None:
        return kind
    if isinstance(module, torch.nn.Linear | torch.nn.MultiheadAttention):
        return "a subclass with a forward of its own"
    if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
        return "looked up, not multiplied"
    if isinstance(module, _FUSED):
        return "torch multiplies all its steps by one operation"
    stacks = [shape for shape in _shapes(module) if _is_stack(shape)]
    if stacks and not isinstance(module, _CONVOLUTIONS):
        return f"stacked matrices of {stacks}; blockscale.nn.experts multiplies by such"
    return None


def unknown(module: torch.nn.Module) -> str:
    """Why a module that is nothing known stays as it is."""
    return f"not a layer that blockscale knows, with parameters of {_shapes(module)}"


def _shapes(module: torch.nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of a module's matrices."""
    parameters = [p for p in parameters_of(module) if not torch.nn.parameter.is_lazy(p)]
    return sorted({tuple(p.shape) for p in parameters if p.dim() > 1})


def _is_stack(shape: tuple[int, ...]) -> bool:
    """Tell whether it is that of several matrices; positions and tokens are (1, tokens, size)."""
    return shape[0] > 1 and sum(size > 1 for size in shape[1:]) > 1


def _is_conv1d(module: torch.nn.Module, definer: type) -> bool:
    """As transformers' Conv1D is, which is not imported."""
    weights, biases = (sources_of(module, name) for name in ("weight", "bias"))
    size = getattr(module, "nf", None)
    return (
        definer.__name__ == "Conv1D"
        and any(w.dim() == 2 and w.shape[1] == size for w in weights)
        and any(tuple(b.shape) == (size,) for b in biases)
    )
