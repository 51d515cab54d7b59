"""A layer changes its class in place.

Whoever holds it, by whatever name, holds the new one, with the same parameters, buffers and hooks.
A subclass that brings no ``forward`` of its own becomes a subclass of both. Parametrizations stay
on top of either.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .attention import MultiheadAttention
from .linear import Linear
from .parametrized import change_class, class_of
from .quantized import QuantizedLinear

__all__ = ["become", "extend", "original", "restore"]


def become(module: torch.nn.Module, cls: Any) -> None:
    """Make a module a ``cls`` that is still what it was before any conversion."""
    change_class(module, _both(cls, original(module)))


def extend(module: torch.nn.Module, cls: Any) -> None:
    """Make a module a ``cls`` that is still what it is, by a conversion, too."""
    change_class(module, _both(cls, class_of(module)))


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
