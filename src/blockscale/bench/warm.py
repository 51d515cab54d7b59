"""Kernels compiled ahead, several at once, into the cache on disk."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from ..kernels.common import compile_cache

__all__ = ["compile_all"]

_MOST = 14  # processes; each imports the compiler, which takes seconds and 1 GB


def compile_all(configs: Iterable[Any]) -> None:
    """Compile each configuration that the cache lacks. What cannot be compiled is left out: who
    loads it gets the error."""
    wanted = list(dict.fromkeys(configs))
    most = min(_MOST, os.cpu_count() or 1, len(wanted))
    if most < 2:
        return
    with ProcessPoolExecutor(most, get_context("spawn")) as pool:
        for each in [pool.submit(_compile, config) for config in wanted]:
            each.exception()


def _compile(config: Any) -> None:
    compile_cache.load(config)
