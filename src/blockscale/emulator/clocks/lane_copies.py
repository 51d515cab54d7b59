"""cp.async in the order of things: each lane's copies are its own.

The lanes of a warp issue theirs at once, as one work, but "writes performed by cp.async operations
are made visible to the executing thread only" by its own wait (PTX ISA 9.7.9.25.3.3). So each lane
has a column for all of its copies. Their event is that of the issue, whenever they complete: a
thread waits for groups in the order of their issue, so whoever knows one knows those before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .knowledge import SEEN, Actor, Knowledge
from .snapshot import Snapshot

if TYPE_CHECKING:
    from ..alarms.errors import Site
    from .order import Order
    from .readers import View

__all__ = ["Copies"]


class Copies:
    """The copies of one instruction of a warp.

    Attributes:
        agents, columns: of each lane.
        event: of all of them.
        reading: which of the lanes read global memory; the others write zeros.
    """

    def __init__(self, order: Order, agents: np.ndarray, site: Site, reading: np.ndarray) -> None:
        self.order, self.agents, self.reading = order, agents, reading
        self.columns = order.who.lanes(agents)
        self.event = order.event(site)
        self._at = Snapshot(order, agents)
        self._view: View | None = None

    def view(self) -> View:
        """What each lane has seen at the issue, in a row of its own."""
        view, columns = self._view, self.order.columns
        if view is None or view[0].shape[1] < columns:
            lanes = np.arange(len(self.agents))
            seen = np.zeros((len(lanes), columns), np.uint32)
            for i, table in enumerate(self._at.tables):
                seen[self._at.which == i, : table.shape[1]] = table[SEEN]
            seen[lanes, self.agents] = self.event
            view = self._view = seen, lanes
        return view

    def readers(self) -> View:
        """The same of those that read global memory."""
        seen = self.view()[0][self.reading]
        return seen, np.arange(len(seen))

    def message(self, lane: int) -> Knowledge:
        """What those learn who know that a lane's are done."""
        known, column = self._at.message(lane), int(self.columns[lane])
        if known.shape[1] <= column:
            known = np.pad(known, ((0, 0), (0, column + 1 - known.shape[1])))
        known[self.order.waited, column] = self.event
        return known

    def unknown(self, known: np.ndarray) -> bool:
        """Whether the last events of the columns that are known leave one of them out."""
        return bool((self.event > known[self.columns]).any())

    def needed(self) -> list[int]:
        """Columns that must not be given to others yet: these never are."""
        return []

    def lane(self, column: int) -> Actor:
        """One lane's, for messages."""
        lane = int(np.flatnonzero(self.columns == column)[0])
        return Actor(
            column, self._at.tables[self._at.which[lane]], int(self.agents[lane]), generic=True
        )
