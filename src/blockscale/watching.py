"""Whether torch's compilers, modes or transforms look on."""

from __future__ import annotations

import sys
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["has_tangent", "is_dtensor", "is_plain", "is_transformed", "unwatched"]

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_dispatch_keys = torch._C._dispatch_keys

_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def unwatched() -> bool:
    """Whether nothing looks on at what is called: compilers, modes, function transforms."""
    if torch.compiler.is_compiling():
        return False
    return not (_dispatch_modes() or _function_modes()) and _transform() is None


def is_transformed() -> bool:
    """Whether a transform of torch.func is at work."""
    return not torch.compiler.is_compiling() and _transform() is not None


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether one of these is differentiated in forward mode."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def is_dtensor(x: object) -> bool:
    """Whether ``x`` is sharded over a mesh of devices. (torch.distributed.tensor is slow to import:
    where nobody has, there is none.)"""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def is_plain(x: Tensor) -> bool:
    """Whether ``x`` is a dense tensor with memory of its own device, and nothing but that: no
    subclass, wrapped by no transform, nor negated lazily, nested, sparse, on meta, or zeros without
    memory."""
    return type(x) in _PLAIN and _dispatch_keys(x).raw_repr() in _keys_of_plain()


@lru_cache
def _keys_of_plain() -> frozenset[int]:
    """Of tensors on a CPU and a GPU, made in inference mode and out of it."""
    keys = set()
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        for inference in (False, True):
            with torch.inference_mode(inference):
                keys.add(_dispatch_keys(torch.empty(0, device=device)).raw_repr())
    return frozenset(keys)
