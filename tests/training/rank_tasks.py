"""Ranks of the tests: processes that start quickly, and what they do otherwise than the command."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from datetime import timedelta
from typing import Any

from blockscale.training import launch, ranks, started_ranks

be_rank = started_ranks._be_rank

_context = multiprocessing.get_context("forkserver")

_PRELOADED = ["blockscale.training", "blockscale.training.sharded_saves", "torch.distributed.fsdp"]

#: What Python tells of files that are written, renamed and removed.
_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def quick_context(_: str) -> Any:
    """Forks of a process that has imported all and has no threads."""
    _context.set_forkserver_preload(_PRELOADED)
    return _context


def gather_as_they_are(pipe: Any, place: Any, work: Any) -> None:
    """FSDP2 gathers weights without blockscale."""
    ranks.gather_quantized = lambda model: model
    be_rank(pipe, place, work)


def be_impatient(pipe: Any, place: Any, work: Any) -> None:
    launch._START = launch._ASK = timedelta(seconds=2)
    be_rank(pipe, place, work)


def die_while_saving(pipe: Any, place: Any, work: Any, *, rank: int, moment: int) -> None:
    """``rank`` is killed before what it does to files of its second save, ``moment`` things later
    than the first."""
    seen = {"renamed": 0, "events": 0}

    def look(event: str, given: Any) -> None:
        if event not in _EVENTS or "unfinished" not in str(given[0]):
            return
        if "writing" in str(given[0]) and event == "open" and "_0.distcp" in str(given[0]):
            seen["renamed"] += 1  # each rank opens its file once a save
        if seen["renamed"] >= 2:
            if seen["events"] == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            seen["events"] += 1

    if place.rank == rank:
        sys.addaudithook(look)
    be_rank(pipe, place, work)
