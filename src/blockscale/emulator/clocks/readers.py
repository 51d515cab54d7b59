"""Who read each cell of a memory since its last write.

Most cells have one reader: its column and event stand there. Where several read that nothing
orders, the cell names a *crowd* instead. A reader that a later one has seen is forgotten: whoever
knows of the later knows of the earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .access import Conflict
from .columns import MOST_COLUMNS

if TYPE_CHECKING:
    from ..alarms.errors import Site
    from .access import Access
    from .order import Order

__all__ = ["Readers", "View", "seen_events"]

_CROWD = MOST_COLUMNS  # stands for a column: the event is then the number of a crowd
_MOST = 1 << 14  # crowds that are kept before those that no cell names are dropped

#: What accessors have seen: tables (any, columns), and whose is which; None: one for all.
View = tuple[np.ndarray, np.ndarray | None]
#: Which of some reads count: events and columns of these, the cells, and who accesses them now.
Which = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
#: Columns and the events of their reads.
Crowd = tuple[np.ndarray, np.ndarray]


def seen_events(view: View, columns: np.ndarray) -> np.ndarray:
    """The last event that each accessor has seen of columns (accessors, k), or (k,) of one."""
    tables, which = view
    if which is None:
        return tables[0].take(columns, mode="clip")
    at = np.minimum(columns, tables.shape[1] - 1)
    return np.asarray(tables[which[:, None], at])


class Readers:
    """The readers of ``cells`` cells."""

    def __init__(self, cells: int, order: Order) -> None:
        self.order = order
        self.column = np.zeros(cells, np.uint16)
        self.event = np.zeros(cells, np.uint32)  # 0: nobody
        self._crowds: list[Crowd] = []
        self._limit = _MOST

    def clear(self, cells: Any) -> None:
        self.event[cells] = 0

    def columns(self) -> np.ndarray:
        """Those of all readers."""
        used = self.event > 0
        crowded = used & (self.column == _CROWD)
        crowds = [self._crowds[number - 1][0] for number in np.unique(self.event[crowded]).tolist()]
        return np.concatenate([np.unique(self.column[used & ~crowded]), *crowds])

    # --- reading ---

    def read(self, cells: np.ndarray, at: Any, event: int, view: View) -> None:
        """Cells (n, k) are read by threads, ``at`` (n, 1), or cells (k,) by one column."""
        if len(self._crowds) >= self._limit:
            self._forget()
        before = self.event.take(cells)
        column = others = None
        if np.count_nonzero(before):
            column = self.column.take(cells)
            others = (before > 0) & (column != at)
            if np.count_nonzero(others):
                others &= (column == _CROWD) | (before > seen_events(view, column))
            if not np.count_nonzero(others):
                others = None
        self.column[cells] = at
        if cells.ndim == 2:
            lost = self.column.take(cells) != at
            if np.count_nonzero(lost):  # several threads of this instruction read one cell
                mark = np.zeros(len(self.column), bool)
                mark[cells[lost]] = True
                others = mark[cells] if others is None else others | mark[cells]
        self.event[cells] = event
        if others is not None:
            if column is None:
                column = np.zeros(before.shape, np.uint16)
            self._meet(cells, others, at, event, before, column, view)

    def _meet(
        self, cells: np.ndarray, chosen: np.ndarray, at: Any, event: int, before: np.ndarray,
        column: np.ndarray, view: View,
    ) -> None:  # fmt: skip
        """The chosen cells have several readers, earlier ones or of this instruction."""
        if cells.ndim == 1:
            self._joins(cells[chosen], at, event, before[chosen], column[chosen], view[0][0])
            return
        # A cell has all its readers: those that no other mark names, too.
        mark = np.zeros(len(self.column), bool)
        mark[cells[chosen]] = True
        chosen = mark[cells]
        who = np.broadcast_to(at, cells.shape)[chosen].astype(np.int64)
        if (who == who[0]).all():
            self._joins(cells[chosen], int(who[0]), event, before[chosen], column[chosen])
            return
        flat, old = cells[chosen], before[chosen].astype(np.int64) << 16 | column[chosen]
        order = np.argsort(flat, kind="stable")
        flat, who, old = flat[order], who[order], old[order]
        new = np.ones(len(flat), bool)  # agents are ascending: each once a cell
        new[1:] = (flat[1:] != flat[:-1]) | (who[1:] != who[:-1])
        if not new.all():
            flat, who, old = flat[new], who[new], old[new]
        starts = np.flatnonzero(np.concatenate([[True], flat[1:] != flat[:-1]]))
        made: dict[tuple[int, bytes], tuple[int, int]] = {}
        found = []
        places = starts.tolist()
        for pair, start, end in zip(
            old[starts].tolist(), places, [*places[1:], len(flat)], strict=True
        ):
            readers = who[start:end]
            key = pair, readers.tobytes()
            if key not in made:
                made[key] = self._crowd(pair, readers, event)
            found.append(made[key])
        self.column[flat[starts]], self.event[flat[starts]] = np.array(found).T

    def _joins(
        self, cells: np.ndarray, one: int, event: int, before: np.ndarray, column: np.ndarray,
        known: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Cells (n,) have one reader more; ``known``: what it has seen, if it is no agent."""
        who = np.array([one])
        old = before.astype(np.int64) << 16 | column
        first = int(old[0])
        if (old == first).all():  # as after a copy by another thread
            self.column[cells], self.event[cells] = self._crowd(first, who, event, known)
            return
        pairs, which = np.unique(old, return_inverse=True)
        found = [self._crowd(int(pair), who, event, known) for pair in pairs]
        self.column[cells], self.event[cells] = np.array(found)[which.reshape(-1)].T

    def _crowd(
        self, old: int, who: np.ndarray, event: int, known: np.ndarray | None = None
    ) -> tuple[int, int]:
        """Column and event of a cell that ``who``, ascending, who have seen ``known``, read, and
        others before: event << 16 | column."""
        columns, events = self._members(old >> 16, old & 0xFFFF)
        if len(columns):
            known = self.order.seen_by(who) if known is None else known
            left = events > known[columns]
            left &= columns != who[0] if len(who) == 1 else ~np.isin(columns, who)
            columns, events = columns[left], events[left]
        columns = np.concatenate([columns, who])
        if len(columns) == 1:
            return int(columns[0]), event
        events = np.concatenate([events, np.full(len(who), event, np.uint32)])
        self._crowds.append((columns, events))
        return _CROWD, len(self._crowds)

    def _members(self, event: int, column: int) -> Crowd:
        if not event:
            return np.zeros(0, np.int64), np.zeros(0, np.uint32)
        if column == _CROWD:
            return self._crowds[event - 1]
        return np.array([column]), np.array([event], np.uint32)

    def _forget(self) -> None:
        """Drop the crowds that no cell names."""
        crowded = np.nonzero((self.event > 0) & (self.column == _CROWD))[0]
        used, at = np.unique(self.event[crowded], return_inverse=True)
        self._crowds = [self._crowds[number - 1] for number in used.tolist()]
        self.event[crowded] = at.reshape(-1) + 1
        self._limit = max(_MOST, 2 * len(used))

    # --- writing ---

    def unseen(
        self, access: Access, which: Which | None = None, chosen: np.ndarray | None = None
    ) -> list[Conflict]:
        """Reads that an access to their cells has not seen: one for each instruction that made
        such reads.

        Args:
            which: says which of the reads conflict with it; None: all.
            chosen: which of its cells are meant; None: all.
        """
        cells, at, view, since = access.cells, access.at, access.view, access.since
        events = self.event.take(cells)
        if chosen is not None:
            events = np.where(chosen, events, 0)
        found: dict[Site, Conflict] = {}
        if not np.count_nonzero(events):
            return []
        columns = self.column.take(cells)
        crowded = (events > 0) & (columns == _CROWD)
        late = (events > seen_events(view, columns)) & ~crowded
        if np.count_nonzero(late):
            late &= (columns != at) | (events < since)
            if which is not None and np.count_nonzero(late):
                who = np.broadcast_to(at, cells.shape)
                late[late] = which(events[late], columns[late], cells[late], who[late])
        if np.count_nonzero(late):
            who = np.broadcast_to(at, cells.shape)[late]
            for i in np.sort(np.unique(events[late], return_index=True)[1]).tolist():
                column, event = int(columns[late][i]), int(events[late][i])
                one = Conflict(int(cells[late][i]), int(who[i]), column, event)
                found.setdefault(self.order.site(event), one)
        if not crowded.any():
            return list(found.values())
        writers = np.broadcast_to(at, cells.shape)[crowded].astype(np.int64)
        rows = np.zeros(cells.shape, np.int64)
        if view[1] is not None:
            rows += view[1][:, None]
        numbers, flat = events[crowded], cells[crowded]
        keys = np.stack([numbers, writers, rows[crowded]])
        for i in np.unique(keys, axis=1, return_index=True)[1].tolist():
            crowd, reads = self._crowds[int(numbers[i]) - 1]
            seen = view[0][int(keys[2, i])]
            late = (reads > seen[crowd]) & ((crowd != writers[i]) | (reads < since))
            if which is not None and np.count_nonzero(late):
                same = np.full((2, np.count_nonzero(late)), ((flat[i],), (writers[i],)))
                late[late] = which(reads[late], crowd[late], *same)
            for column, event in zip(crowd[late].tolist(), reads[late].tolist(), strict=True):
                one = Conflict(int(flat[i]), int(writers[i]), column, event)
                found.setdefault(self.order.site(event), one)
        return list(found.values())
