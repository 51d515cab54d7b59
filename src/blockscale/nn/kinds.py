"""The layers that can be converted, and what each becomes.

A layer changes its class in place: whoever holds it, by whatever name, holds the new one, with the
same parameters, buffers and hooks. A subclass that brings no ``forward`` of its own becomes a
subclass of both. Parametrizations stay on top of either.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention import MultiheadAttention
from .linear import Linear, linear
from .parametrized import change_class, class_of, parameters_of, sources_of
from .quantized import QuantizedConv1D, QuantizedLinear
from .recipe import Recipe

__all__ = [
    "CONVERTED",
    "QUANTIZED",
    "Conv1D",
    "Kind",
    "become",
    "kind_of",
    "original",
    "restore",
    "unknown",
]


class Conv1D(torch.nn.Module):
    """A linear layer whose weight is (in, out), as transformers' Conv1D; made by :func:`convert`.

    Its weight is transposed in every forward pass.
    """

    recipe: Recipe
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.mT.contiguous(), self.bias, recipe=self.recipe)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}".removeprefix(", ")


class Kind(NamedTuple):
    """A layer as ``convert`` makes it, and as ``quantize_`` does (None: it does not)."""

    converted: type[torch.nn.Module]
    quantized: type[torch.nn.Module] | None


_LINEAR = Kind(Linear, QuantizedLinear)
_CONV1D = Kind(Conv1D, QuantizedConv1D)
_ATTENTION = Kind(MultiheadAttention, None)

#: Of the class that defines ``forward``.
_KINDS = {
    torch.nn.Linear: _LINEAR,
    Linear: _LINEAR,
    QuantizedLinear: _LINEAR,
    Conv1D: _CONV1D,
    QuantizedConv1D: _CONV1D,
    torch.nn.MultiheadAttention: _ATTENTION,
    MultiheadAttention: _ATTENTION,
}

CONVERTED = (Linear, Conv1D, MultiheadAttention)
QUANTIZED = (QuantizedLinear, QuantizedConv1D)

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
        return f"stacked matrices of {stacks}; blockscale.grouped_gemm multiplies experts"
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


def become(module: torch.nn.Module, cls: Any) -> None:
    """Make a module a ``cls`` that is still what it was before any conversion."""
    change_class(module, _both(cls, original(module)))


def restore(module: torch.nn.Module) -> None:
    """Make a module what it was before any conversion."""
    change_class(module, original(module))


_PLAIN: dict[type, type] = {
    Linear: torch.nn.Linear,
    QuantizedLinear: torch.nn.Linear,
    MultiheadAttention: torch.nn.MultiheadAttention,
}


def original(module: torch.nn.Module) -> type:
    """The class of a layer before it was converted, under its parametrizations."""
    cls = class_of(module)
    return cls.__dict__.get("_original") or _PLAIN.get(cls, cls)


@cache
def _both(cls: Any, plain: Any) -> Any:
    if _PLAIN.get(cls) is plain:
        return cls

    def reduce(module: Any, protocol: Any) -> tuple[Any, ...]:
        new, (_, *arguments), *state = super(made, module).__reduce_ex__(protocol)
        if type(module) is not made:  # made a subclass by somebody else
            return new, (type(module), *arguments), *state
        return _new, (cls, plain, *arguments), *state

    # its name, so that what looks for that finds it; pickle would find the plain class by it
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    made: Any = type(
        plain.__name__, (cls, plain), {**names, "_original": plain, "__reduce_ex__": reduce}
    )
    return made


def _new(cls: type, plain: type, *arguments: Any) -> Any:
    both = _both(cls, plain)
    return both.__new__(both, *arguments)
