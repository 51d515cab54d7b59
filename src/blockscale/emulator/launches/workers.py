"""Clusters of a grid in several processes, which share the memory of the launch.

Each process is a fork that runs every n-th cluster. Global memory moves to pages that all of them
see, and back at the end; atomic operations take turns under one lock.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from ..memory.buffers import Buffer, GlobalMemory
from ..ptx.program import PtxError

__all__ = ["Peers", "run_forked"]

_MOVES, _OVER = -1, -2


class Peers:
    """What the processes of a launch tell each other: who still moves, and who waits for whom.

    A process that goes round in circles may be waiting for what another will write. None of them
    can go on once all that are not over do so with the same memory before them.
    """

    def __init__(self, count: int) -> None:
        self._said = multiprocessing.get_context("fork").RawArray("q", [_MOVES] * count)

    def moves(self, process: int) -> None:
        self._said[process] = _MOVES

    def over(self, process: int) -> None:
        self._said[process] = _OVER

    def agree(self, process: int, digest: int, leaps: bool) -> bool:
        """Whether all wait, this one with what ``digest`` is of in memory; and it is this one that
        ``leaps`` in time, if any."""
        self._said[process] = 2 * digest + leaps
        others = [said for said in self._said if said != _OVER]
        if all(said // 2 == digest for said in others) and leaps == any(s % 2 for s in others):
            return True
        time.sleep(0.001)  # the others do the work now
        return False


@contextmanager
def _shared(memory: GlobalMemory) -> Iterator[None]:
    """The buffers in pages that forks share, under their old addresses."""
    moved: list[tuple[Buffer, np.ndarray]] = []
    for buffer in memory:
        if buffer.writable:
            original = buffer.data
            pages = np.frombuffer(mmap.mmap(-1, max(len(original), 1)), np.uint8)[: len(original)]
            pages[:] = original
            buffer.data = pages
            moved.append((buffer, original))
    try:
        yield
    finally:
        for buffer, original in moved:
            original[:] = buffer.data
            buffer.data = original


def run_forked(memory: GlobalMemory, count: int, run: Callable[[int], Any]) -> list[Any]:
    """``run(i)`` in process i of ``count``; their results, in order.

    Raises the first error of any of them, after stopping the others.
    """
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    processes = []
    with _shared(memory):
        for number in range(count):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(there, run, number), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        results: dict[int, Any] = {}
        try:
            while len(results) < count:
                for pipe in wait([p for i, p in enumerate(pipes) if i not in results]):
                    number = pipes.index(pipe)  # type: ignore[arg-type]
                    results[number] = _received(pipe)
        finally:
            for process in processes:
                process.terminate()
                process.join()
    return [results[i] for i in range(count)]


def _received(pipe: Any) -> Any:
    try:
        failed, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise PtxError("a worker process of the emulator died") from None
    if failed:
        raise value
    return value


def _work(pipe: Connection, run: Callable[[int], Any], number: int) -> None:
    gc.freeze()  # a collection of what the parent has would copy its pages
    try:
        answer = False, run(number)
    except BaseException as error:
        answer = True, error
    pipe.send_bytes(pickle.dumps(answer))
