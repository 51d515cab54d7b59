"""Many kernels compiled at once, each process some of them, into the cache on disk."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from . import compile_cache

__all__ = ["compile_all"]

_MOST = 14  # processes; each imports the compiler, which takes seconds and 1 GB


def compile_all(configs: Iterable[Any], processes: int | None = None) -> int:
    """Compile each configuration that the cache lacks; how many that are.

    What cannot be compiled is left out: who loads it gets the error.
    """
    wanted = [each for each in dict.fromkeys(configs) if not compile_cache.is_cached(each)]
    most = min(processes or _MOST, os.cpu_count() or 1, len(wanted))
    if most < 2:
        _compile(wanted)
        return len(wanted)
    # no pool of multiprocessing: its workers import the caller's script once more
    command = [sys.executable, "-c", f"from {__name__} import _main; _main()"]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(most)]
    for i, worker in enumerate(workers):
        assert worker.stdin is not None
        worker.stdin.write(pickle.dumps(sys.path) + pickle.dumps(wanted[i::most]))
        worker.stdin.close()
    for worker in workers:
        worker.wait()
    return len(wanted)


def _main() -> None:
    sys.path[:] = pickle.load(sys.stdin.buffer)  # first: the configurations' types are found by it
    _compile(pickle.load(sys.stdin.buffer))


def _compile(configs: Iterable[Any]) -> None:
    for config in configs:
        try:
            compile_cache.load(config)
        except Exception:
            continue  # the next one may do
