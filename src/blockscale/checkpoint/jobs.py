"""Files in the making: tasks spread over threads, journals, and manifests."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from xxhash import xxh3_128

from ..checks import check_target
from ..threads import single
from .files import Files
from .header import Header, build
from .manifest import VERSION, read_manifest, stale_tensors
from .reader import Reader
from .statistics import error_bin_edges
from .storage import check_names
from .tasks import Source, Task
from .writer import Output, beside

__all__ = ["Job", "Progress", "check_distinct", "job_of", "run_jobs"]


@dataclass(frozen=True)
class Progress:
    """How far a conversion is: handed to its ``progress``, of one thread at a time.

    ``bytes`` of ``total_bytes`` of the source are dealt with, ``tensors`` are finished. ``note``
    tells what became of an earlier attempt (finished, resumed, or why it was started anew).
    """

    name: str = ""
    tensors: int = 0
    total_tensors: int = 0
    bytes: int = 0
    total_bytes: int = 0
    note: str = ""


Tell = Callable[[Progress], None]


@dataclass(frozen=True)
class Job:
    """One file to be made.

    Attributes:
        target: its name.
        tasks: what makes its tensors.
        metadata: of its header.
        options: what was asked for. An unfinished file made with others is not gone on with.
        about: more for the manifest.
        replaces: what is under the name of the target, but from another job, is made anew.
    """

    target: Path
    tasks: tuple[Task, ...]
    metadata: Mapping[str, str]
    options: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)
    replaces: bool = False

    @cached_property
    def _built(self) -> tuple[bytes, Header]:
        stored = ((name, *what) for task in self.tasks for name, what in task.stored.items())
        return build(stored, self.metadata)

    @property
    def head(self) -> bytes:
        """Length and JSON of its header."""
        return self._built[0]

    @property
    def header(self) -> Header:
        """Where its tensors lie."""
        return self._built[1]

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What decides about the bytes of the file, beside those of the source."""
        return {"blockscale": _version(), **self.options}


def job_of(
    file: Reader,
    target: Path,
    tasks: Sequence[Task],
    metadata: Mapping[str, str],
    options: Mapping[str, Any],
    about: Mapping[str, Any] = MappingProxyType({}),
) -> Job:
    """The job that makes ``target`` of one file of the source, which the manifest then names.

    Raises ValueError where two tasks would write a tensor of one name.
    """
    check_names((stored for task in tasks for stored in task.stored), "source")
    source = {"name": file.path.name, "size": file.header.file_size}
    return Job(target, tuple(tasks), metadata, {**options, "source": source}, about)


def _version() -> str:
    # looked up, not imported: the package imports far more than checkpoint needs
    return str(sys.modules[__name__.partition(".")[0]].__version__)


def run_jobs(files: Files, jobs: Sequence[Job], tell: Tell) -> Iterator[dict[str, Any]]:
    """Make all files, in this order, each under its name when it is complete; yields manifests.

    As many threads as torch has work on tensors; those of the next file are begun while the last
    ones of a file are still in work.
    """
    total = sum(files.stored(n).nbytes for j in jobs for t in j.tasks for n in t.reads)
    counter = _Counter(tell, sum(len(job.tasks) for job in jobs), total)
    stop = threading.Event()
    open_: deque[_Open] = deque()
    with ThreadPoolExecutor(torch.get_num_threads(), "blockscale") as pool:
        try:
            for job in jobs:
                open_.append(_Open(files, job, _finished(files, job, counter), counter, stop))
                open_[-1].start(pool)
                if len(open_) > 1:
                    yield _finish_first(open_)
            while open_:
                yield _finish_first(open_)
        finally:  # of an error: the threads stop at their next piece
            stop.set()
            pool.shutdown(cancel_futures=True)
            for each in open_:
                each.abandon()


def _finish_first(open_: deque[_Open]) -> dict[str, Any]:
    """Finish the file that was begun first, and forget it; returns its manifest.

    Nothing is left to close then, even where the caller fails on the manifest.
    """
    manifest = open_[0].finish()
    open_.popleft()
    return manifest


class _Stopped(Exception):
    """Another task failed."""


class _Counter:
    """Adds up what threads did."""

    def __init__(self, tell: Tell, tensors: int, total: int) -> None:
        self._tell, self._tensors, self._total = tell, tensors, total
        self._done = self._bytes = 0
        self._lock = threading.Lock()

    def add(self, count: int, name: str = "", note: str = "", tensors: int = 0) -> None:
        """Count bytes of a tensor that were dealt with, or tensors that are finished."""
        with self._lock:
            self._bytes += count
            self._done += tensors
            self._tell(Progress(name, self._done, self._tensors, self._bytes, self._total, note))


class _Open:
    """A file in the making."""

    def __init__(
        self,
        files: Files,
        job: Job,
        made: dict[str, Any] | None,
        counter: _Counter,
        stop: threading.Event,
    ) -> None:
        self._files, self._job, self._counter, self._stop = files, job, counter, stop
        self._made = made
        self._futures: list[Future[None]] = []
        if made is not None:
            return
        tasks = {task.name: task for task in job.tasks}
        self._out = Output(
            job.target,
            job.head,
            job.header,
            job.identity,
            lambda name, record: _is_current(files, tasks.get(name), record),
        )

    def start(self, pool: ThreadPoolExecutor) -> None:
        """Hand its tasks to threads."""
        for task in self._job.tasks if self._made is None else ():
            if task.name in self._out.records:
                self._counter.add(_bytes(self._files, task), task.name, self._out.note, 1)
            else:
                self._futures.append(pool.submit(self._run, task))

    def _run(self, task: Task) -> None:
        def seen(count: int) -> None:
            if self._stop.is_set():
                raise _Stopped
            self._counter.add(count, task.name, self._out.note)

        with single():
            seen(0)
            source = Source(self._files, task.reads, seen)
            parts = self._out.parts(task.stored)
            record = task.run(source, parts)
        sums = {name: part.checksum() for name, part in parts.items()}
        self._out.finish(task.name, {"source": source.checksums(), "checksums": sums, **record})
        self._counter.add(0, task.name, self._out.note, 1)

    def finish(self) -> dict[str, Any]:
        """Wait for all tasks; the file gets its name."""
        if self._made is not None:
            return self._made
        done, _ = wait(self._futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        self._files.check_unchanged()
        manifest = self._manifest()
        self._out.commit(manifest)
        return manifest

    def abandon(self) -> None:
        """Keep what is finished, for another attempt."""
        if self._made is None:
            self._out.close()

    def _manifest(self) -> dict[str, Any]:
        job, records = self._job, self._out.records
        sizes = {name: stored.nbytes for name, stored in job.header.tensors.items()}
        return {
            "manifest": VERSION,
            **job.identity,
            **job.about,
            "file": {
                "name": job.target.name,
                "size": job.header.file_size,
                "header": self._out.header_checksum,
            },
            "error_bin_edges": error_bin_edges(),
            "tensors": {
                task.name: {
                    "dtype": task.tensor.dtype,
                    "shape": list(task.tensor.shape),
                    "source_bytes": _bytes(self._files, task),
                    "bytes": sum(sizes[name] for name in records[task.name]["checksums"]),
                    **records[task.name],
                }
                for task in job.tasks
            },
        }


def _bytes(files: Files, task: Task) -> int:
    return sum(files.stored(name).nbytes for name in task.reads)


def _is_current(files: Files, task: Task | None, record: Mapping[str, Any]) -> bool:
    """Whether the source has the bytes that a record was made of."""
    if task is None or set(record.get("source", ())) != set(task.reads):
        return False
    same = all(files.holder(n).checksum(n) == made for n, made in record["source"].items())
    return same and task.is_current(record)


def _finished(files: Files, job: Job, counter: _Counter) -> dict[str, Any] | None:
    """The manifest of a target that is the result of this very job; None where it is to be made.

    Raises ValueError for anything else under that name, unless the job replaces it.
    """
    target = job.target
    if not os.path.lexists(target):
        return None
    made = read_manifest(target)
    if made is None or (why := _why_another(files, job, made)):
        why = "has no manifest" if made is None else why
        if not job.replaces:
            raise ValueError(
                f"target: {target} exists and {why}; remove it, or choose another name"
            )
        counter.add(0, note=f"started anew: {target.name} {why}")
        target.unlink()
        return None
    for suffix in ".journal", ".partial":  # of a process that was killed at the very end
        beside(target, suffix).unlink(missing_ok=True)
    counter.add(
        sum(_bytes(files, task) for task in job.tasks),
        note=f"nothing to do: {target} is finished already",
        tensors=len(job.tasks),
    )
    return made


def _why_another(files: Files, job: Job, made: Mapping[str, Any]) -> str:
    """Why what is under the name of the target is not what this job makes; "" if it is."""
    for key, value in job.identity.items():
        if made.get(key) != value:
            return f"was made with another {key}"
    try:
        file = Reader(job.target, "target")
    except ValueError:
        if not job.replaces:
            raise
        return "is not whole"
    with file:
        if stale_tensors(file, made):
            return "is not what its manifest says"
        if file.header_checksum() != xxh3_128(job.head).hexdigest():
            return "was made with another choice of tensors"
    tasks = {task.name: task for task in job.tasks}
    same = tasks.keys() == made["tensors"].keys() and all(
        _is_current(files, tasks[name], record) for name, record in made["tensors"].items()
    )
    return "" if same else "was made with another source"


def check_distinct(files: Files, target: Path) -> None:
    """ValueError where writing ``target`` would destroy a file of the source."""
    check_target("target", target)
    for suffix in ("", ".partial", ".journal", ".lock", ".manifest.json", ".manifest.json.partial"):
        path = beside(target, suffix)
        if path.exists() and any(path.samefile(files.folder / name) for name in files.names):
            raise ValueError(
                f"target: writing {target} would destroy the source {files.folder}; choose another "
                "name"
            )
