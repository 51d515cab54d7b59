"""An access to cells of shared or Tensor Memory, and an earlier one that it conflicts with.

Two accesses to one cell conflict if one of them is a write (PTX ISA 8.7.1). They race if nothing
orders them, unless they are morally strong with each other: see scopes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .knowledge import NEVER, Actor
from .lane_copies import Copies
from .scopes import WEAK

if TYPE_CHECKING:
    from ..alarms.errors import Site
    from .readers import View

__all__ = ["Access", "Conflict"]


class Conflict(NamedTuple):
    """An earlier access that an access to its cell has not seen.

    Attributes:
        cell: the cell.
        by: the column of who accesses it now.
        column, event: of the earlier access.
    """

    cell: int
    by: int
    column: int
    event: int


class Access(NamedTuple):
    """An access that is checked now.

    Attributes:
        cells: (n, k), k of each of n threads, or (k,) of one piece of work.
        at: the columns of who accesses, (n, 1); that of a piece of work is a number.
        view: what these have seen.
        site: the instruction, for messages.
        verb: what it does, for messages: "reads", "writes", or "ends" an mbarrier.
        code: its scope, proxy and width, see scopes.
        work: a copy, the work of a tensor core, or the cp.async of several lanes; None if threads
            access the cells themselves.
    """

    cells: np.ndarray
    at: Any
    view: View
    site: Site
    verb: str
    code: int = WEAK
    work: Actor | Copies | None = None

    @property
    def since(self) -> int:
        """The event from which on earlier accesses of its own column are ordered before it.

        Those of a thread all are. Those of cp.async are not, even in one lane (8.9.1.1).
        """
        if self.work is None:
            return 0
        return self.work.since if isinstance(self.work, Actor) else NEVER

    def seeing(self, seen: np.ndarray) -> Access:
        """The same access, as if its work had seen only ``seen``, an event of each column."""
        return self._replace(view=(seen[None], None))

    def who(self, column: int) -> int | Actor:
        """The thread, piece of work or lane that has one of its columns, for messages."""
        if isinstance(self.work, Copies):
            return self.work.lane(column)
        return column if self.work is None else self.work
