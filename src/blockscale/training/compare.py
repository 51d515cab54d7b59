"""Every recipe with every seed: side by side in processes of one thread each, or one by one."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from .data import Corpus, Text
from .recipes import RECIPES
from .run import Progress, Run, train
from .saves import Saves
from .settings import Settings

__all__ = ["compare"]

Report = Callable[[Progress], None]
Stop = Callable[[], bool]


def compare(
    recipes: Sequence[str],
    text: Text,
    settings: Settings,
    report: Report = lambda progress: None,
    folder: Path | None = None,
    stop: Stop = lambda: False,
) -> list[Run]:
    """Train under each of ``recipes`` with each seed; the runs, by recipe, then seed.

    ``report`` is called in this process after each step of any of them (on a GPU, after some).
    With a ``folder`` runs are saved there and go on from what is saved; when ``stop`` says so they
    are saved, and :class:`Stopped` is raised.

    On a CPU each run has one thread, so its losses depend neither on the number of cores nor on
    what runs beside it; matrices this small gain little from a second thread.
    """
    corpus = Corpus(text, settings.context, settings.device)
    # all recipes of a seed first: what a comparison needs is done at about the same time
    jobs = [(name, seed) for seed in range(settings.seeds) for name in recipes]
    if settings.device == "cpu":
        runs = _in_processes(jobs, (text, settings, folder), report, stop)
    else:
        runs = [
            train(n, RECIPES[n], s, corpus, settings, report, _saves(folder, n, s), stop)
            for n, s in jobs
        ]
    return sorted(runs, key=lambda run: (recipes.index(run.recipe), run.seed))


def _saves(folder: Path | None, name: str, seed: int) -> Saves | None:
    return None if folder is None else Saves(folder, name, seed)


def _in_processes(
    jobs: list[tuple[str, int]],
    given: tuple[Text, Settings, Path | None],
    report: Report,
    stop: Stop,
) -> list[Run]:
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    events: multiprocessing.Queue[Progress] = context.Queue()
    stopping = context.Event()
    workers = min(len(jobs), _cores())
    pool = ProcessPoolExecutor(workers, context, _start, (events, stopping, *given))
    try:
        futures = [pool.submit(_job, name, seed) for name, seed in jobs]
        for _ in _forwarded(events, futures, report):
            if stop():
                stopping.set()
        return [future.result() for future in futures]
    finally:
        stopping.set()
        pool.shutdown(cancel_futures=True)


def _forwarded(events: Any, futures: list[Future[Run]], report: Report) -> Iterator[None]:
    """Hand events on until all runs are done or one has failed, a few at a time."""
    while True:
        yield
        done = [future for future in futures if future.done()]
        finished = len(done) == len(futures) or any(future.exception() for future in done)
        try:
            while True:
                report(events.get(timeout=0 if finished else 0.2))
        except queue.Empty:
            if finished:
                return


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --- in a worker ----------------------------------------------------------------------------------

_worker: dict[str, Any] = {}


def _start(events: Any, stop: Any, text: Text, settings: Settings, folder: Path | None) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):  # the parent says when to stop
        signal.signal(each, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    corpus = Corpus(text, settings.context)
    _worker.update(events=events, stop=stop, corpus=corpus, settings=settings, folder=folder)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _job(name: str, seed: int) -> Run:
    saves, stop = _saves(_worker["folder"], name, seed), _worker["stop"].is_set
    given = _worker["corpus"], _worker["settings"], _worker["events"].put, saves, stop
    return train(name, RECIPES[name], seed, *given)
