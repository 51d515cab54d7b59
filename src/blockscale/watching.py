"""Whether torch's compilers, modes or transforms look on."""

from __future__ import annotations

import torch

__all__ = ["unwatched"]

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack


def unwatched() -> bool:
    """Whether nothing looks on at what is called: compilers, modes, function transforms."""
    if torch.compiler.is_compiling():
        return False
    return not (_dispatch_modes() or _function_modes()) and _transform() is None
