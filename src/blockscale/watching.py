"""Whether torch's compilers, modes or transforms look on."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = [
    "has_tangent",
    "has_transform",
    "is_dtensor",
    "is_eager",
    "is_faked",
    "is_plain",
    "is_transformed",
    "refuse_tangents",
    "unwatched",
]

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_dispatch_keys = torch._C._dispatch_keys

_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_plain_keys: dict[int, bool] = {}  # sets of dispatch keys -> whether plain tensors have them


def unwatched() -> bool:
    """Whether nothing looks on at what is called: compilers, modes, function transforms."""
    if torch.compiler.is_compiling():
        return False
    return not (_dispatch_modes() or _function_modes()) and _transform() is None


def is_faked() -> bool:
    """Whether tensors that are made have no values: torch follows shapes."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_eager() -> bool:
    """Whether calls may go by what was found for calls alike: nothing looks on, differentiates in
    forward mode or traces."""
    return unwatched() and forward_ad._current_level < 0 and not torch._C._is_tracing()


def is_transformed() -> bool:
    """Whether a transform of torch.func is at work."""
    return not torch.compiler.is_compiling() and _transform() is not None


def has_transform() -> bool:
    """The same, in code that a compiler traces too."""
    return _transform() is not None


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether one of these is differentiated in forward mode."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def refuse_tangents(what: str, *tensors: Tensor | None, remedy: str = "") -> None:
    """NotImplementedError where one of these is differentiated in forward mode; ``remedy``: what
    may be done beside differentiating in reverse."""
    if has_tangent(*tensors):
        raise NotImplementedError(
            f"{what} no forward-mode derivative (jvp, jacfwd, dual tensors): differentiate in "
            f"reverse (backward, torch.func.grad){remedy}"
        )


def is_dtensor(x: object) -> bool:
    """Whether ``x`` is sharded over a mesh of devices. (torch.distributed.tensor is slow to import:
    where nobody has, there is none.)"""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def is_plain(x: Tensor) -> bool:
    """Whether ``x`` is a dense tensor with memory of its own device, and nothing but that: no
    subclass, wrapped by no transform, nor negated lazily, nested, sparse, on meta, or zeros without
    memory."""
    if type(x) not in _PLAIN:
        return False
    keys = _dispatch_keys(x).raw_repr()
    known = _plain_keys.get(keys)
    return _learn(keys, x.device) if known is None else known


def _learn(keys: int, device: torch.device) -> bool:
    """Whether tensors that were just made have these keys, in inference mode or out of it."""
    plain = False
    for inference in (False, True):
        with torch.inference_mode(inference):
            made = torch.empty(0, device=device)
        plain |= keys == _dispatch_keys(made).raw_repr() and not made.is_meta
    _plain_keys[keys] = plain
    return plain
