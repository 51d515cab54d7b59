"""``warm``: kernels compiled ahead, several at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .gemm_launch import forget_launches
from .kernels.common import runtime
from .kernels.common.gpu import Gpu
from .kernels.common.runtime import standing_in

__all__ = ["warm"]


@contextmanager
def warm(*, processes: int | None = None) -> Iterator[list[Any]]:
    """Compile the kernels of what is called inside the block, several at once, for later.

    A kernel is compiled when it is first needed, one after another: a second or two each, about
    ten for a model's first step. Inside the block none is compiled and none runs. At its end those
    that would have run are compiled by several processes, into the cache on disk, where this
    process and others find them.

    >>> with bs.warm():
    ...     model(x).sum().backward()  # numbers without meaning

    Nothing inside may depend on values, and no optimizer may step. It holds in all threads. Where
    there is no GPU, nothing is compiled and all runs as it does without.

    Args:
        processes: at most; default one a processor core, up to 14. Each takes about 1 GB.

    Yields: the configurations of the kernels found so far.
    """
    found: list[Any] = []
    outside = runtime._find

    def find(device: torch.device) -> Gpu | None:
        gpu = outside(device)
        return gpu and replace(gpu, load=partial(_note, found))

    forget_launches()  # which know operands, but no GPU
    try:
        with standing_in(find):
            yield found
    finally:
        forget_launches()
    if found:
        from .kernels.common.compile_all import compile_all

        compile_all(found, processes)


def _note(found: list[Any], config: Any) -> Callable[..., None]:
    found.append(config)
    return _nothing


def _nothing(*_: Any) -> None:
    return None
