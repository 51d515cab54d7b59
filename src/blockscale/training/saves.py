"""Unfinished runs: a folder that holds what they have come to, and from which they go on.

A file for each run (of ranks a folder, ``sharded_saves.py``) is written whole or not at all, so
that one that is killed goes on from the last one; ``plan.json`` says what the comparison is to be.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from filelock import FileLock, Timeout

from ..checks import reading
from .data import Text
from .settings import Settings

__all__ = [
    "Plan",
    "RunSaves",
    "Saves",
    "State",
    "Stopped",
    "alone",
    "digest",
    "forget",
    "saved_runs",
    "unreadable",
]

_FOLDER, _PLAN, _LOCK = "unfinished", "plan.json", "lock"

#: Plain values by name, of a run that is saved.
State = dict[str, Any]


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the unfinished runs of a folder; ValueError where another process does."""
    lock = FileLock(folder / _FOLDER / _LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(
            f"resume: another process goes on with the runs of {folder}; wait for it, or end it"
        ) from None
    try:
        yield
    finally:
        lock.release()


class Stopped(Exception):
    """A run was told to stop, and is saved."""


def digest(text: Text) -> str:
    """SHA-256 of both parts, in hexadecimal."""
    return hashlib.sha256(text.train + text.validation).hexdigest()


@dataclass(frozen=True)
class Plan:
    """What a comparison is to be: its recipes, settings, and the text, by what ``--data`` named and
    by its hash."""

    recipes: tuple[str, ...]
    settings: Settings
    data: str | None
    sha256: str

    def write(self, folder: Path) -> None:
        (folder / _FOLDER).mkdir(exist_ok=True)
        with _replacing(folder / _FOLDER / _PLAN) as part:
            part.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """ValueError where the folder has none, or one that this version did not write."""
        path = folder / _FOLDER / _PLAN
        if not path.exists():
            raise ValueError(
                f"resume: {folder} has no unfinished runs; name the folder that `blockscale train` "
                "was stopped in"
            )
        with reading("resume", path):
            text = path.read_text(encoding="utf-8")
        try:
            found = json.loads(text)
            given = found.pop("settings")
            given["betas"] = tuple(given["betas"])
            return cls(tuple(found.pop("recipes")), Settings(**given), **found)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"resume: {path} is damaged, or of another version ({error}); start anew"
            ) from None

    def by_ranks(self, **given: Any) -> Plan:
        """The same by the ranks that are given along dimensions, if any; ValueError for runs of one
        process, and as Settings."""
        names = [name for name, ranks in given.items() if ranks is not None]
        if not names:
            return self
        if not self.settings.mesh:
            raise ValueError(
                f"resume: is given beside {' and '.join(names)}, but one process began each of "
                f"these runs; leave out {' and '.join(f'--{name}' for name in names)}, or start "
                "anew"
            )
        return replace(self, settings=replace(self.settings, **given))

    def check(self, text: Text) -> None:
        """ValueError unless ``text`` is that which the runs began with."""
        if digest(text) != self.sha256:
            raise ValueError(
                f"resume: {text.source} has changed since the runs began; restore it, or start anew"
            )


class RunSaves(Protocol):
    """Where one run is saved: by a process, or by ranks."""

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State | None:
        """What ``write`` or ``finish`` was given last, or None; model and optimizer become what
        they were."""

    def write(self, rest: State, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Model, optimizer, and the rest, instead of what was there."""

    def finish(self, rest: State) -> None:
        """What is left of a run that has come to its end."""


@dataclass(frozen=True)
class Saves:
    """Of one run in a folder."""

    folder: Path
    recipe: str
    seed: int

    @property
    def path(self) -> Path:
        return self.folder / _FOLDER / f"{self.recipe}-{self.seed}.pt"

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State | None:
        if not self.path.exists():
            return None
        found = self.read(next(model.parameters()).device)
        if "model" in found:
            model.load_state_dict(found.pop("model"))
            optimizer.load_state_dict(found.pop("optimizer"))
        return found

    def write(self, rest: State, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._write(rest | {"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    def finish(self, rest: State) -> None:
        self._write(rest)

    def read(self, device: torch.device | str = "cpu") -> State:
        """What the file has, tensors on ``device``."""
        try:
            found: State = torch.load(self.path, map_location=device, weights_only=True)
        except Exception as error:  # whatever reading a damaged file raises
            raise unreadable(self.path, error) from None
        return found

    def _write(self, state: State) -> None:
        with _replacing(self.path) as part:
            torch.save(state, part)


def unreadable(path: Path, error: BaseException) -> ValueError:
    """To raise where a saved run is damaged."""
    return ValueError(
        f"resume: cannot read {path} ({type(error).__name__}); remove it to train that run from "
        "the start"
    )


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Where to write what then takes the place of ``path``, at once."""
    part = path.with_suffix(".part")
    yield part
    os.replace(part, path)


def saved_runs(folder: Path) -> Sequence[Path]:
    """The files of runs that have come to something, or the folders that ranks wrote."""
    found = (folder / _FOLDER).glob("*")
    return sorted(path for path in found if path.suffix == ".pt" or path.suffix[:5] == ".step")


def forget(folder: Path) -> None:
    """Remove what unfinished runs left."""
    shutil.rmtree(folder / _FOLDER, ignore_errors=True)
