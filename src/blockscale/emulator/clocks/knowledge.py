"""What somebody knows of what was done before: tables of a few rows over the columns of an order.

Each access is an *event* with a number, and whoever accesses has a *column*. An entry of a table is
the last event of a column that happens before whatever its owner does next:

- ``SEEN``: events that happen before;
- ``FENCED``: those that the asynchronous proxy may rely on, too, because a proxy fence lies between
  (PTX ISA 8.6.1, proxy-preserved base causality order);
- ``INITS``: those up to which mbarriers were initialized before a fence.mbarrier_init, which a
  relaxed arrival passes on, too (9.7.13.4);
- ``RUN``: events that are over, whatever is said of memory: a relaxed arrival passes them on, and
  so do match.sync and the exit of a thread that others wait for. Tensor Memory is ordered by
  execution, for "tcgen05.fence composes with execution ordering instructions" (9.7.16.6.3), the
  ISA's example being a relaxed store and load. An mbarrier.inval asks no more of its own warp;
- ``PASSED``: those that a release tells to tcgen05 instructions elsewhere: all that do without
  tcgen05.fence::before_thread_sync, and those that had one, or a tcgen05.commit, after them;
- ``TENSOR``: those that the owner's next tcgen05 instruction may rely on: what it waited for
  itself, and what was passed to it before a tcgen05.fence::after_thread_sync (9.7.16.6.4).
  No message has this row. The last two are there only if they are asked for.

Tables are never changed, so a message is one, too. What an agent did itself is known to it without
being there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from .scopes import WEAK

__all__ = [
    "FENCED",
    "INITS",
    "NEVER",
    "PASSED",
    "RUN",
    "SEEN",
    "TENSOR",
    "Actor",
    "Joins",
    "Knowledge",
    "Pipe",
    "executed",
    "joined",
]

M = TypeVar("M")
_JOINED = 64  # joined messages that are kept

SEEN, FENCED, INITS, RUN, PASSED, TENSOR = range(6)
#: An event later than any that happens: nobody has seen it.
NEVER = 0xFFFFFFFF

Knowledge = np.ndarray  # (rows, columns) uint32, rows as above; columns that are not there are 0


def joined(first: Knowledge, second: Knowledge) -> Knowledge:
    """Knowledge of all that one message or the other tells."""
    if first.shape[1] < second.shape[1]:
        first, second = second, first
    both = first.copy()
    part = both[:, : second.shape[1]]
    np.maximum(part, second, out=part)
    return both


class Joins(Generic[M]):
    """Joins messages, and keeps the result for when the same ones are joined again."""

    def __init__(self, join: Callable[[list[M]], M]) -> None:
        self._make = join
        self._made: dict[frozenset[int], tuple[list[M], M]] = {}  # with what the numbers are of

    def __call__(self, messages: list[M]) -> M:
        key = frozenset(map(id, messages))
        if len(key) == 1:
            return messages[0]
        if key not in self._made:
            if len(self._made) >= _JOINED:
                self._made.clear()
            self._made[key] = messages, self._make(messages)
        return self._made[key][1]


def executed(message: Knowledge) -> Knowledge:
    """The part of a message that needs no order of memory: the rows from RUN on."""
    left = message.copy()
    left[:RUN] = 0
    return left


class Pipe:
    """Work that is done in the order of its issue."""

    __slots__ = ("column", "event", "known")

    def __init__(self, column: int) -> None:
        self.column, self.event = column, 0
        self.known: Knowledge | None = None


@dataclass(slots=True)
class Actor:
    """A piece of asynchronous work: its column, and what was known at its issue."""

    column: int
    known: Knowledge
    issuer: int  # an agent
    pipe: Pipe | None = None
    tensor: bool = False  # a tcgen05 instruction, where those are ordered by their fences
    generic: bool = False  # works in the generic proxy, like ordinary accesses
    code: int = WEAK  # of its accesses: see scopes
    shares: bool = False  # the column with other work, which is not ordered with this
    event: int = 0  # its last access
    first: int = 0  # and its first
    view: tuple[np.ndarray, np.ndarray] | None = None  # see Order.view_of
    stored: list[int] = field(default_factory=list)  # its writes of global memory, by number

    def did(self, event: int) -> None:
        self.event, self.first = event, self.first or event
        if self.pipe is not None:
            self.pipe.event = event

    @property
    def since(self) -> int:
        """From which event on those of its column are its own, or ordered by their pipe."""
        return (self.first or NEVER) if self.shares else 0

    def unknown(self, known: np.ndarray) -> bool:
        """Whether the last events of the columns that are known leave its own out."""
        return bool(self.event > known[self.column])

    def needed(self) -> list[int]:
        """Columns that must not be given to others yet."""
        return [self.column]

    def message(self) -> Knowledge:
        """Knowledge that those acquire who wait for this work, once it is done."""
        if not self.event and self.pipe is not None:  # it accessed nothing: what came before it
            self.event = self.pipe.event
        known = self.known.copy()
        before = self.known[PASSED:, self.column].copy()
        known[:, self.column] = self.event
        if not self.tensor:
            known[TENSOR:] = 0
        elif self.pipe is None:  # tcgen05.wait, which is no fence
            known[PASSED, self.column] = before[0]
        else:  # tcgen05.commit, which is one, too
            np.maximum(known[PASSED], known[TENSOR], out=known[PASSED])
            known[TENSOR] = 0
        return known
