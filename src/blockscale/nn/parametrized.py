"""Layers whose parameters torch.nn.utils.parametrize computes from others.

Such a layer has a class of its own, made by torch on top of the one before. It has the computed
parameters as properties, which are never read here: spectral_norm changes by being computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

__all__ = ["change_class", "class_of", "parameters_of", "sources_of"]


def class_of(module: torch.nn.Module) -> type:
    """The class of a module under its parametrizations."""
    cls = type(module)
    return cls.__bases__[0] if _is_of_torch(module) else cls


def change_class(module: torch.nn.Module, cls: Any) -> None:
    """Make ``cls`` the class under the parametrizations, which stay and can be removed."""
    if _is_of_torch(module):
        own = {k: v for k, v in vars(type(module)).items() if k not in ("__dict__", "__weakref__")}
        # never shared: torch removes a parametrization's property from the class
        cls = type(f"Parametrized{cls.__name__}", (cls,), own)
    module.__class__ = cls


def _is_of_torch(module: torch.nn.Module) -> bool:
    """Whether its class is the one that torch made for it, and no subclass of that."""
    return is_parametrized(module) and all(name in vars(type(module)) for name in _lists(module))


def parameters_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters that a module holds itself, and those that computed ones are made of."""
    if isinstance(module, ParametrizationList):  # they are of the module that it computes for
        return []
    return [p for each in (module, *_lists(module).values()) for p in _held(each)]


def sources_of(module: torch.nn.Module, name: str) -> list[torch.nn.Parameter]:
    """A parameter of a module, or those that it is computed from."""
    lists = _lists(module)
    if name in lists:
        return _held(lists[name])
    return [parameter for own, parameter in _named(module) if own == name]


def _lists(module: torch.nn.Module) -> Any:
    """Return the parametrizations of each computed parameter, by its name."""
    return module.parametrizations if is_parametrized(module) else {}


def _held(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for _, parameter in _named(module)]


def _named(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Parameters that a module holds itself: of a scripted one, ``_parameters`` has but items."""
    return [(name, p) for name, p in module._parameters.items() if p is not None]
