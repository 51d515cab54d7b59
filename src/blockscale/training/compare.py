"""Every recipe with every seed: side by side in processes of one thread each, or one by one, on
ranks or without."""

from __future__ import annotations

import multiprocessing
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .data import Corpus, Text
from .launch import Work, torchrun_place, train_all, train_as_rank
from .ranks import Ranks
from .run import Progress, Run, train
from .saves import Saves
from .settings import Settings
from .started_ranks import train_by_started
from .workers import become_worker

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
    are saved, and :class:`Stopped` is raised. Ranks of ``settings`` train each run together:
    processes that are started here, or those that torchrun has started, all of which call this.

    On a CPU each run has one thread, so its losses depend neither on the number of cores nor on
    what runs beside it; matrices this small gain little from a second thread.
    """
    work = Work(recipes, text, settings, folder)
    if settings.mesh:
        place = torchrun_place(settings)
        if place is None:
            runs = train_by_started(work, report, stop)
        else:
            runs = train_as_rank(place, work, report, stop)
    elif settings.device == "cpu":
        runs = _in_processes(work, report, stop)
    else:
        runs = train_all(work, report, stop, Ranks(torch.device(settings.device)))
    return sorted(runs, key=lambda run: (recipes.index(run.recipe), run.seed))


def _in_processes(work: Work, report: Report, stop: Stop) -> list[Run]:
    # all recipes of a seed first: what a comparison needs is done at about the same time
    jobs = [(name, seed) for seed in range(work.settings.seeds) for name in work.recipes]
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    events: multiprocessing.Queue[Progress] = context.Queue()
    stopping = context.Event()
    workers = min(len(jobs), _cores())
    pool = ProcessPoolExecutor(workers, context, _start, (events, stopping, work))
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


def _start(events: Any, stop: Any, work: Work) -> None:
    become_worker()
    corpus = Corpus(work.text, work.settings.context)
    _worker.update(events=events, stop=stop, corpus=corpus, work=work)


def _job(name: str, seed: int) -> Run:
    work, stop = _worker["work"], _worker["stop"].is_set
    saves = None if work.folder is None else Saves(work.folder, name, seed)
    return train(name, seed, _worker["corpus"], work.settings, _worker["events"].put, saves, stop)
