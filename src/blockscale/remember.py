"""``remembered``: checks that depend on a few small values are made once for each of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

import torch

__all__ = ["remembered"]

P = ParamSpec("P")
R = TypeVar("R")


def remembered(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` with a cache of its last 4096 results, for calls that can be looked up.

    Compiled code is traced through the function, and arguments without a hash are passed to it.
    """
    cached: Callable[..., R] = lru_cache(maxsize=4096)(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            try:
                return cached(*args, **kwargs)
            except TypeError:  # no hash, or raised by the function: then it says so again
                pass
        return function(*args, **kwargs)

    return call
