"""Who has which column in the tables of what is known: agents, pipes and copies.

Columns of copies are given to others once nobody needs them any more, and there are as many as it
takes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import numpy as np

from ..ptx.program import PtxError

__all__ = ["MOST_COLUMNS", "Columns"]

MOST_COLUMNS = 0xFFFF
_COPIES = 64  # at the start


class Columns:
    """The columns of a cluster, in this order: agents, pipes, the kernel before, copies.

    Args:
        agents, pipes: how many there are.
        programmatic: whether the kernel before this one has a column, too.
    """

    def __init__(self, agents: int, pipes: int, programmatic: bool) -> None:
        self.agents = agents
        self.predecessor = agents + pipes if programmatic else None
        self._first_copy = agents + pipes + programmatic
        self.count = self._first_copy + _COPIES
        #: Writers whose accesses the asynchronous proxy sees only after a proxy fence.
        self.is_generic = np.arange(self.count) < agents
        self._free = list(range(self.count - 1, self._first_copy - 1, -1))
        self._next_pipe = agents
        self._told: dict[Hashable, int] = {}  # of copies that tell mbarriers
        self.of_lanes = np.zeros(agents, np.int32)  # of the cp.async of each agent, 0: none yet
        #: Each says which columns it still needs; see ``_reclaim``.
        self.users: list[Callable[[], Iterable[int]]] = []

    def pipe(self, name: Hashable) -> int:
        """The column of a new pipe; ``name`` is for the error where there is none left."""
        column = self._next_pipe
        self._next_pipe += 1
        if self._next_pipe > self._first_copy:
            raise ValueError(f"no column for the pipe {name!r}")
        return column

    def copy(self, generic: bool, told: Hashable = None) -> int:
        """A column for a copy: one that nobody has, or the one of earlier copies that tell the same
        mbarriers.

        Args:
            generic: whether it works through the generic proxy.
            told: the mbarriers that it tells; None: others learn of it in some other way.
        """
        column = None if told is None else self._told.get((told, generic))
        if column is None:
            if not self._free:
                self._reclaim()
            column = self._free.pop()
            self.is_generic[column] = generic
            if told is not None:
                self._told[told, generic] = column
        return column

    def lanes(self, agents: np.ndarray) -> np.ndarray:
        """The columns of the cp.async of agents (n,): each has one for all of its copies."""
        for agent in agents[self.of_lanes[agents] == 0].tolist():
            self.of_lanes[agent] = self.copy(True, ("cp.async", agent))
        return np.asarray(self.of_lanes[agents])

    def _reclaim(self) -> None:
        """Columns of copies that nobody needs any more; new ones if these are few.

        A copy is needed while it is in flight, and as long as one of its accesses is the last to
        some place: without that nothing can be compared with it, and it can be forgotten.
        """
        needed = {column for user in self.users for column in user()}
        needed.update(self._told.values())
        copies = range(self.count - 1, self._first_copy - 1, -1)
        self._free = [column for column in copies if column not in needed]
        if len(self._free) < len(copies) // 2:
            more = len(copies)
            if self.count + more >= MOST_COLUMNS:
                raise PtxError(f"more than {self.count} accessors that nobody has waited for")
            self._free += range(self.count + more - 1, self.count - 1, -1)
            self.count += more
            self.is_generic = np.concatenate([self.is_generic, np.zeros(more, bool)])
