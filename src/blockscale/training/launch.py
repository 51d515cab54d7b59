"""Ranks that train the runs of a comparison together: started here, or by torchrun."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import __version__
from .data import Corpus, Text
from .ranks import Ranks, ShardedRanks, check_same_facts
from .run import Progress, Run, train
from .saves import digest
from .settings import Settings
from .tensor_plan import check_blocks

__all__ = [
    "Place",
    "RankLost",
    "Work",
    "joined",
    "open_store",
    "torchrun_place",
    "train_all",
    "train_as_rank",
]

#: For ranks to come, for what they do together (a save is the longest), and to say who is left.
_START, _STEP, _ASK = timedelta(seconds=60), timedelta(minutes=10), timedelta(seconds=5)


class RankLost(RuntimeError):
    """A rank has ended, and others wait for it."""


@dataclass(frozen=True)
class Work:
    """The runs of a comparison, and the folder they are saved in.

    Raises ValueError where ranks cannot share the layers of a recipe.
    """

    recipes: Sequence[str]
    text: Text
    settings: Settings
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.settings.tp is not None:
            check_blocks(self.recipes, self.settings.width, self.settings.tp)


@dataclass(frozen=True)
class Place:
    """Of one rank, and where all of them meet. ``serves``: others wait for its store."""

    rank: int
    ranks: int
    local: int  # of its machine: its GPU
    host: str
    port: int
    serves: bool = False
    attempt: str = ""

    def store(self) -> Any:
        """What ranks tell each other before they are a group, and when they are none any more."""
        found = open_store(self.host, self.port, self.serves)
        return dist.PrefixStore(f"blockscale/{self.attempt}", found)  # type: ignore[attr-defined]


def open_store(host: str, port: int, serves: bool) -> Any:
    """A TCPStore; of port 0 one that is free."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=serves, wait_for_workers=False, timeout=_START
    )


def torchrun_place(settings: Settings) -> Place | None:
    """Where torchrun has started this process, or None.

    Raises ValueError where the ranks of ``settings`` cannot train here.
    """
    if not settings.mesh:
        return None
    ranks, names = settings.ranks, " and ".join(settings.mesh)
    got = " x ".join(map(str, settings.mesh.values()))
    options = " and ".join(f"--{name}" for name in settings.mesh)
    if not dist.is_available():
        raise ValueError(
            f"{names}: torch {torch.__version__} was built without torch.distributed; install one "
            f"that has it, or leave out {options}"
        )
    given = os.environ
    started = "RANK" in given and "WORLD_SIZE" in given
    if started and int(given["WORLD_SIZE"]) != ranks:
        raise ValueError(
            f"{names}: got {got}, but torchrun has started {given['WORLD_SIZE']} ranks; give "
            f"{options} that many, or --nproc-per-node {ranks} to torchrun"
        )
    here = int(given.get("LOCAL_WORLD_SIZE", ranks)) if started else ranks
    if settings.device != "cpu" and here > torch.cuda.device_count():
        raise ValueError(
            f"{names}: {here} ranks need a GPU each, and torch sees {torch.cuda.device_count()}; "
            f"give {options} a smaller number, or use more machines by torchrun"
        )
    if not started:
        return None
    served = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    rank = int(given["RANK"])
    return Place(
        rank,
        ranks,
        int(given.get("LOCAL_RANK", rank)),
        given.get("MASTER_ADDR", "localhost"),
        int(given.get("MASTER_PORT", "29500")),
        serves=rank == 0 and not served,
        attempt=given.get("TORCHELASTIC_RESTART_COUNT", ""),
    )


@contextmanager
def joined(place: Place, work: Work) -> Iterator[Ranks]:
    """Be one of the ranks.

    Raises ValueError where others do not come or do not have the same ``work``, and RankLost where
    one ends before its work does.
    """
    device = torch.device("cpu")
    if work.settings.device != "cpu":
        device = torch.device("cuda", place.local)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if place.rank:
        warnings.simplefilter("ignore")  # the first one says them
    store = _meet(place)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=place.rank,
        world_size=place.ranks,
        timeout=_STEP,
    )
    try:
        check_same_facts(
            {"recipes": ", ".join(work.recipes)}
            | asdict(work.settings)
            | {"text": digest(work.text), "blockscale": __version__, "torch": torch.__version__}
        )
        with _answering(store, place):
            yield ShardedRanks(device, **work.settings.mesh)
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo/" in str(error)):
            raise
        why = str(error).split("] ")[-1].split(". ")[0]  # without a line of C++ and advice
        raise RankLost(f"{_lost(store, place)} ended before its work did ({why})") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _meet(place: Place) -> Any:
    """The store; ValueError that names ranks that do not come."""
    try:
        store = place.store()
        missing = _absent(store, place, "here", _START)
    except RuntimeError:
        missing = "rank 0"  # whose store it is
    if missing:
        raise ValueError(
            f"ranks: {missing} did not come within {_START.seconds} s; start {place.ranks} ranks "
            "with the same arguments"
        )
    return store


@contextmanager
def _answering(store: Any, place: Place) -> Iterator[None]:
    """Say that this rank lives when one asks, though it may be waiting for one that does not."""
    done = threading.Event()

    def answer() -> None:
        with suppress(RuntimeError):  # the store has gone with its rank
            while not done.wait(0.5):
                if store.check(["asked"]):
                    store.set(f"alive {place.rank}", "")
                    return

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _lost(store: Any, place: Place) -> str:
    """Those that do not say that they live."""
    try:
        store.set("asked", "")
        return _absent(store, place, "alive", _ASK) or "a rank"
    except RuntimeError:
        return "rank 0"  # whose store it was


def _absent(store: Any, place: Place, word: str, patience: timedelta) -> str:
    """Ranks that do not say ``word`` while this one waits, by name."""
    store.set(f"{word} {place.rank}", "")
    until = time.monotonic() + patience.total_seconds()
    while True:
        absent = [i for i in range(place.ranks) if not store.check([f"{word} {i}"])]
        if not absent or time.monotonic() > until:
            return ", ".join(f"rank {i}" for i in absent)
        time.sleep(0.05)


def train_as_rank(
    place: Place,
    work: Work,
    report: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Run]:
    """Every run, as the rank of ``place``; the first one's folder is that of all."""
    with joined(place, work) as ranks:
        folder = ranks.told(work.folder)
        return train_all(replace(work, folder=folder), report, stop, ranks)


def train_all(
    work: Work, report: Callable[[Progress], None], stop: Callable[[], bool], ranks: Ranks
) -> list[Run]:
    """One after another, all recipes of a seed first."""
    corpus = Corpus(work.text, work.settings.context, str(ranks.device))
    shown = report if ranks.rank == 0 else lambda progress: None
    runs = []
    for seed in range(work.settings.seeds):
        for name in work.recipes:
            saves = None if work.folder is None else ranks.saves(work.folder, name, seed)
            runs.append(train(name, seed, corpus, work.settings, shown, saves, stop, ranks))
    return runs
