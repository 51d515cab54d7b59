"""Which table of knowledge each agent has: those that learned the same share one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from .columns import Columns
from .events import Events
from .knowledge import FENCED, SEEN, TENSOR, Knowledge

__all__ = ["Tables"]

_TABLES = 4096  # kept before those that nobody has are dropped


class Tables(Events):
    """What agents know now, and knew at their last fence of each scope.

    Args:
        who: has the columns.
        rows: of a table.
        scopes: fences that are told apart.
        copies_fence: whether the wait for a cp.async is a proxy fence, too.
    """

    def __init__(self, who: Columns, rows: int, scopes: int, copies_fence: bool) -> None:
        super().__init__()
        self.who, self._rows = who, rows
        self._tables: list[Knowledge] = [np.zeros((rows, who.count), np.uint32)]
        self._number_of = {id(self._tables[0]): 0}
        self._limit = _TABLES
        self._table_of = np.zeros(who.agents, np.int32)
        self._table_at_fence = np.zeros((scopes, who.agents), np.int32)
        self._own_at_fence = np.zeros((scopes, who.agents), np.uint32)
        #: Rows of what a thread knows that waited for its cp.async.
        self.waited = [row for row in range(min(rows, TENSOR)) if copies_fence or row != FENCED]
        self._learned = 0  # how often agents got other tables

    @property
    def columns(self) -> int:
        """How many there are now."""
        return self.who.count

    @property
    def version(self) -> int:
        """Of what agents know, in tables of so many columns: both numbers only grow."""
        return self._learned + self.who.count

    def _fit(self, known: Knowledge) -> Knowledge:
        """With a column for everybody there is now."""
        lacking = self.columns - known.shape[1]
        return np.pad(known, ((0, 0), (0, lacking))) if lacking else known

    def join(self, messages: Iterable[Knowledge]) -> Knowledge:
        joined = np.zeros((self._rows, self.columns), np.uint32)
        for message in messages:
            part = joined[:, : message.shape[1]]
            np.maximum(part, message, out=part)
        return joined

    def _together(self, tables: np.ndarray) -> Knowledge:
        """What all who have these tables know, an array of its own."""
        first, *others = self._distinct(tables)
        known = np.zeros((self._rows, self.columns), np.uint32)
        known[:, : self._tables[first].shape[1]] = self._tables[first]
        for other in others:
            part = known[:, : self._tables[other].shape[1]]
            np.maximum(part, self._tables[other], out=part)
        return known

    def _number(self, table: Knowledge) -> int:
        """The number of a table."""
        number = self._number_of.get(id(table))
        if number is None:
            number = self._number_of[id(table)] = len(self._tables)
            self._tables.append(table)
        return number

    def _forget(self) -> None:
        """Drop the tables that nobody has."""
        both = np.concatenate([self._table_of[None], self._table_at_fence])
        used, at = np.unique(both, return_inverse=True)
        self._tables = [self._tables[i] for i in used.tolist()]
        self._number_of = {id(table): i for i, table in enumerate(self._tables)}
        numbers = at.astype(np.int32).reshape(both.shape)
        self._table_of, self._table_at_fence = numbers[0], numbers[1:]
        self._limit = max(_TABLES, 2 * len(used))

    def _distinct(self, tables: np.ndarray) -> list[int]:
        first = int(tables[0])
        if len(tables) == 1 or not np.count_nonzero(tables != first):
            return [first]
        return np.unique(tables).tolist()

    def acquire(self, agents: np.ndarray, message: Knowledge) -> None:
        message = self._fit(message)

        def learn(known: Knowledge) -> Knowledge:
            known = self._fit(known)
            return message if (known <= message).all() else np.maximum(known, message)

        self._replace(agents, learn)

    def _replace(self, agents: np.ndarray, change: Callable[[Knowledge], Knowledge]) -> None:
        """Give these agents other tables for theirs."""
        if len(self._tables) >= self._limit:
            self._forget()  # which numbers them anew
        tables = self._table_of[agents]
        changed = {old: self._number(change(self._tables[old])) for old in self._distinct(tables)}
        if len(changed) == 1:
            self._table_of[agents] = changed[int(tables[0])]
        else:
            self._table_of[agents] = [changed[old] for old in tables.tolist()]
        self._learned += 1

    def _copy_row(self, agents: np.ndarray, source: int, into: int) -> None:
        def copy(known: Knowledge) -> Knowledge:
            new = known.copy()
            np.maximum(new[into], new[source], out=new[into])
            return new

        self._replace(agents, copy)

    def tables_of(self, agents: np.ndarray) -> tuple[list[Knowledge], np.ndarray]:
        """What these agents know: tables, and whose is which."""
        tables = self._table_of[agents]
        used = self._distinct(tables)
        return [self._tables[i] for i in used], np.searchsorted(used, tables)

    def at_fences(
        self, agents: np.ndarray
    ) -> tuple[list[tuple[list[Knowledge], np.ndarray]], np.ndarray]:
        """The same as of their last fences of each scope, and their own events then."""
        found = []
        for row in self._table_at_fence:
            tables = row[agents]
            used = self._distinct(tables)
            found.append(([self._tables[i] for i in used], np.searchsorted(used, tables)))
        return found, self._own_at_fence[:, agents]

    def wait_for_own(self, agents: np.ndarray, events: np.ndarray) -> None:
        """Each agent knows its copies up to such an event; 0: it has waited for none."""
        columns = self.who.of_lanes[agents]
        tables, which = self.tables_of(agents)
        known = np.zeros((len(agents), self._rows, self.columns), np.uint32)
        for i, table in enumerate(tables):
            known[which == i, :, : table.shape[1]] = table
        lanes = np.arange(len(agents))
        lacks = known[lanes, SEEN, columns] < events
        if not lacks.any():
            return
        if len(self._tables) + len(agents) >= self._limit:
            self._forget()
        for row in self.waited:
            known[lanes[lacks], row, columns[lacks]] = events[lacks]
        for lane in lanes[lacks].tolist():
            self._table_of[agents[lane]] = self._number(known[lane])
        self._learned += 1
