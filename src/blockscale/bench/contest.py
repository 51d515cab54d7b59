"""Products timed side by side: all ready first, then each twice, there and back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..ops import FallbackWarning
from .timing import Timer

__all__ = [
    "BASELINE",
    "OURS",
    "Absent",
    "Call",
    "Contest",
    "Row",
    "Speedup",
    "Where",
    "contest",
    "ready",
    "speedups",
    "turns",
]

Call = Callable[[], object]

OURS = "blockscale"
BASELINE = "torch, bf16"  # what is always measured, as far as it can be


@dataclass(frozen=True, slots=True)
class Where:
    """``case`` of a table's ``group``: a product (M, K) by (K, N)."""

    group: str
    case: str
    m: int
    n: int
    k: int

    @property
    def shape(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


@dataclass(frozen=True, slots=True)
class Contest:
    """What is timed at ``where``: ``products`` of 2 M N K flops.

    ``contestants``: who -> a function that makes what is needed and returns the call to time. It
    raises, or the call does, where a library is missing or has nothing for this GPU.
    """

    where: Where
    contestants: Mapping[str, Callable[[], Call]]
    products: int = 1


@dataclass(frozen=True, slots=True)
class Row(Where):
    """A measurement: the mean of two medians."""

    who: str
    microseconds: float
    tflops: float


@dataclass(frozen=True, slots=True)
class Absent(Where):
    """What could not run, and why."""

    who: str
    why: str


def ready(prepare: Callable[[], Call]) -> Call | str:
    """The call, after its first time; or why it cannot be made.

    Plain torch in the place of a kernel of ours is no measurement of ours: it counts as absent.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            call = prepare()
            call()
    except Exception as error:  # whatever a library raises: the table says it
        return _why(error)
    return call


class Clock(Protocol):
    """What tells how long a call takes: a Timer on the GPU, or one of the host."""

    def microseconds(self, call: Call, repeats: int) -> float: ...


def turns(calls: dict[str, Call], timer: Clock, repeats: int = 30) -> dict[str, float | str]:
    """Microseconds of each call, or why it failed. All in turn, then all in reverse: what drifts
    evenly with the clocks falls on all alike."""
    found: dict[str, float | str] = {}
    for share, names in ((0.5, list(calls)), (0.5, list(reversed(calls)))):
        for name in names:
            before = found.get(name, 0.0)
            if isinstance(before, str):
                continue
            try:
                found[name] = before + share * timer.microseconds(calls[name], repeats)
            except Exception as error:
                found[name] = _why(error)
    return {name: found[name] for name in calls}


def contest(one: Contest, timer: Timer) -> Iterator[Row | Absent]:
    """Time the contestants; those that cannot run are told first."""
    it = one.where
    where = it.group, it.case, it.m, it.n, it.k
    tera = 2e-6 * one.products * it.m * it.n * it.k
    torch.compiler.reset()  # it compiles a function for few shapes only
    calls: dict[str, Call] = {}
    for who, prepare in one.contestants.items():
        call = ready(prepare)
        if isinstance(call, str):
            yield Absent(*where, who, call)
        else:
            calls[who] = call
    for who, took in turns(calls, timer).items():
        if isinstance(took, str):
            yield Absent(*where, who, took)
        else:
            yield Row(*where, who, took, tera / took)


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times as fast as ``who`` ours is: geometric mean over shapes, and the least."""

    group: str
    case: str
    who: str
    mean: float
    least: float
    shape: str  # of the least
    shapes: int


def speedups(rows: Sequence[Row]) -> list[Speedup]:
    """Ours beside each peer, where both were measured in the same contest."""
    ours = {(r.group, r.case, r.shape): r.microseconds for r in rows if r.who == OURS}
    ratios: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        mine = ours.get((row.group, row.case, row.shape))
        if not row.who.startswith(OURS) and mine is not None:
            found = ratios.setdefault((row.group, row.case, row.who), {})
            found[row.shape] = row.microseconds / mine
    results = []
    for where, found in ratios.items():
        mean = math.exp(sum(map(math.log, found.values())) / len(found))
        least = min(found, key=lambda shape: found[shape])
        results.append(Speedup(*where, mean, found[least], least, len(found)))
    return results
