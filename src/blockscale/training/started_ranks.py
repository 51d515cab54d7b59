"""Ranks as processes of this one, which says what they report and which of them has failed."""

from __future__ import annotations

import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from .launch import Place, RankLost, Work, open_store, train_as_rank
from .run import Progress, Run
from .workers import become_worker, leave

__all__ = ["train_by_started"]

_HOST = "127.0.0.1"
_PATIENCE = 5.0  # seconds in which a rank that others have lost is seen to have ended


def train_by_started(
    work: Work, report: Callable[[Progress], None], stop: Callable[[], bool]
) -> list[Run]:
    """Start ``work.settings.ranks`` on this machine and let them train every run.

    Raises what a rank raised, and :class:`RankLost`, which names it, where one died.
    """
    ranks = work.settings.ranks
    store = open_store(_HOST, 0, serves=True)
    started = [Started(Place(i, ranks, i, _HOST, store.port), work) for i in range(ranks)]
    told = False
    failed: list[Started] = []
    try:
        while not failed:
            failed = _listen(started, report)
            if not told and stop():
                told = True
                started[0].tell_to_stop()
            if all(each.runs for each in started):
                return started[0].runs
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until and all(each.lost_another for each in failed):
            failed += _listen(started, report)
        raise _cause(failed)
    finally:
        for each in started:
            each.end()


class Started:
    """A rank in a process of its own, and what has come from it."""

    def __init__(self, place: Place, work: Work) -> None:
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        self.rank = place.rank
        self.runs: list[Run] = []
        self.error: BaseException | None = None
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_be_rank, args=(theirs, place, work))
        self.process.start()
        theirs.close()  # so that its end is seen

    def take(self, report: Callable[[Progress], None]) -> bool:
        """What it has sent; whether it has failed with it."""
        try:
            event = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.pipe.close()
            self.process.join()
            return not self.runs and self.error is None
        if isinstance(event, Progress):
            report(event)
        elif isinstance(event, BaseException):
            self.error = event
        else:
            self.runs = event
        return self.error is not None

    def tell_to_stop(self) -> None:
        """It agrees on that with the others."""
        with suppress(OSError):  # it has ended, which will be heard
            self.pipe.send(None)

    @property
    def lost_another(self) -> bool:
        """Whether it failed as another one had."""
        return isinstance(self.error, RankLost)

    def failure(self) -> BaseException:
        """What it raised, or how it died."""
        if self.error is not None:
            return self.error
        code = self.process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return RankLost(f"rank {self.rank} {how}, and the others have been ended")

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _listen(started: list[Started], report: Callable[[Progress], None]) -> list[Started]:
    """Ranks that have failed meanwhile, the first one first."""
    heard: dict[object, Started] = {x.pipe: x for x in started if not x.pipe.closed}
    return [
        heard[pipe]
        for pipe in wait([x.pipe for x in heard.values()], 0.2)
        if heard[pipe].take(report)
    ]


def _cause(failed: list[Started]) -> BaseException:
    """Of all failures: one that is not about another rank's end, then a death, in their order."""

    return min(failed, key=lambda each: (each.lost_another, each.error is None)).failure()


# --- in a rank ------------------------------------------------------------------------------------


def _be_rank(pipe: Connection, place: Place, work: Work) -> None:
    become_worker()
    try:
        # what the parent sends is the wish to stop
        pipe.send(train_as_rank(place, work, pipe.send, pipe.poll))
    except BaseException as error:
        pipe.send(_sendable(error, place.rank))
    leave()


def _sendable(error: BaseException, rank: int) -> BaseException:
    """``error`` and where it was raised."""
    where = f"on rank {rank}:\n{traceback.format_exc()}"
    error.add_note(where)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(where)
    return error
