"""``operation``: makes a torch.library op that costs nothing where torch need not see it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = ["operation"]

P = ParamSpec("P")
R = TypeVar("R")

_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None), str, int, float, bool})


def operation(fake: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function as ``blockscale::<its name>``; ``fake`` makes what it returns, empty.

    The function must not change or return its arguments, has no gradient and takes a tensor first.
    """

    def register(run: Callable[P, R]) -> Callable[P, R]:
        op = torch.library.custom_op(f"blockscale::{run.__name__}", run, mutates_args=())
        op.register_fake(fake)

        @wraps(run)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return (run if _eager(*args, *kwargs.values()) else op)(*args, **kwargs)

        return call

    return register


def _eager(*args: Any) -> bool:
    """Whether a function of these may be called at once, without torch's dispatcher.

    The dispatcher costs more than the launch of a kernel. It is needed where something looks on
    (compilers, modes, function transforms) and for tensors that only stand for others.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return _PLAIN.issuperset(map(type, args)) and not args[0].is_meta
