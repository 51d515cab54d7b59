"""Spread chunks of work over threads.

Threads of our own rather than numba's: GNU OpenMP ends a process that forks after its first use,
numba's own pool ends one in which two threads call at once, and both spin while they wait. These
sleep, may be called from any thread and are made anew after a fork.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["run", "single"]

T = TypeVar("T")

_here = threading.local()

_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_lock = threading.Lock()


def _forget() -> None:
    """After a fork: the child has neither the pool's threads nor the owner of the lock."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _submit(work: Callable[[], None], copies: int) -> list[Future[None]]:
    global _pool, _pool_size
    with _lock:  # also while submitting: another thread may replace the pool by a larger one
        if _pool is None or _pool_size < copies:
            if _pool is not None:
                _pool.shutdown(wait=False)
            _pool, _pool_size = ThreadPoolExecutor(copies, "blockscale"), copies
        futures: list[Future[None]] = []
        try:
            for _ in range(copies):
                futures.append(_pool.submit(work))
        except RuntimeError:
            pass  # the main thread has ended, and Python takes no new work: the caller does it all
        return futures


@contextmanager
def single() -> Iterator[None]:
    """What :func:`run` does in it, it does on the calling thread alone: one of several that work at
    once."""
    before, _here.single = getattr(_here, "single", False), True
    try:
        yield
    finally:
        _here.single = before


def run(work: Callable[[int, int], T], items: int, chunk: int, threads: int) -> list[T]:
    """Call ``work(first, last)`` on ranges that cover ``range(items)``; the results, in any order.

    ``work`` must release the GIL to gain by it. Uses so many ``threads`` at most,
    this one among them, each for ``chunk`` items or more: with fewer, this one works alone.
    """
    threads = min(threads, items // chunk)
    if threads < 2 or getattr(_here, "single", False):
        return [work(0, items)] if items else []
    size = max(chunk, -(-items // (8 * threads)))  # several each: one that is held up does fewer
    starts = iter(range(0, items, size))
    results: list[T] = []

    def drain() -> None:
        for first in starts:
            results.append(work(first, min(first + size, items)))

    futures = _submit(drain, threads - 1)
    drain()
    for future in futures:
        future.cancel()  # one that has not begun has nothing left to do
    wait(futures)
    for future in futures:
        if not future.cancelled():
            future.result()
    return results
