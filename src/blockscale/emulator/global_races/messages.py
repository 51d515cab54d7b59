"""What clusters tell each other through global memory, and what their agents know of others.

A message says of clusters what of each is known: two rows of its tables of knowledge. An agent
that acquires one does so at an event of its own: whoever has seen that event, by a barrier, an
mbarrier or whatever else orders a cluster, knows the message, too. So it is with a proxy fence of
global memory: what its thread knew then is a message that it acquires.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ..clocks.knowledge import SEEN, Joins, joined

if TYPE_CHECKING:
    from ..clocks.order import Order

__all__ = ["THROUGH", "Learned", "Message", "fenced", "together"]

THROUGH = 2
#: Of clusters, by number: (3, columns), the rows SEEN, FENCED, which is for shared memory, and
#: THROUGH, what the asynchronous proxy may rely on in global memory. Messages are never changed.
Message = dict[int, np.ndarray]

_VIEWS = 64


def together(messages: Iterable[Message]) -> Message:
    """What all say; the first one itself, if the others add nothing."""
    found: Message = {}
    own = False
    for message in messages:
        if not found:
            found = message
            continue
        for cluster, rows in message.items():
            before = found.get(cluster)
            if before is rows:
                continue
            if before is not None:
                part = before[:, : rows.shape[1]]
                if part.shape == rows.shape and (rows <= part).all():
                    continue
                rows = joined(before, rows)
            if not own:
                found, own = dict(found), True
            found[cluster] = rows
    return found


def fenced(message: Message) -> Message:
    """The same after a proxy fence of global memory."""
    changed = {cluster: rows.copy() for cluster, rows in message.items()}
    for rows in changed.values():
        rows[THROUGH] = rows[SEEN]
    return changed


class Learned:
    """The messages that the agents of a cluster have acquired."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self._events: dict[int, list[int]] = {}  # of each agent that acquired, ascending
        self._messages: dict[int, list[Message]] = {}  # all that it had acquired by then
        self._taken: dict[int, Message] = {}  # the last one alone
        self._join = Joins(together)
        self._version = -1
        self._views: dict[int, tuple[np.ndarray, list[Message], np.ndarray | None]] = {}

    def has(self, agent: int) -> bool:
        """Whether an agent has acquired any itself."""
        return agent in self._events

    def lacking(self, agents: np.ndarray, message: Message) -> np.ndarray:
        """Those of the agents that did not acquire this message last."""
        lack = [self._taken.get(agent) is not message for agent in agents.tolist()]
        return agents[lack]

    def add(self, agents: np.ndarray, event: int, message: Message) -> None:
        """Agents acquire a message at an event."""
        merged: dict[int, Message] = {}
        for agent in agents.tolist():
            self._taken[agent] = message
            events = self._events.setdefault(agent, [])
            messages = self._messages.setdefault(agent, [])
            new = message
            if messages:
                before = messages[-1]
                if id(before) not in merged:
                    merged[id(before)] = together((before, message))
                new = merged[id(before)]
                if new is before:
                    continue
            events.append(event)
            messages.append(new)
        self._views.clear()

    def _known(self, row: np.ndarray) -> list[Message]:
        """Messages known to who has seen so much of each column."""
        found = []
        for agent, events in self._events.items():
            seen = int(row[agent])
            at = len(events) if seen >= events[-1] else bisect_right(events, seen)
            if at:
                found.append(self._messages[agent][at - 1])
        return found

    def known(self, seen: np.ndarray) -> Message:
        """What is known of clusters to who has seen so much of each column."""
        return self._join(self._known(seen)) if self._events else {}

    def of_rows(self, seen: np.ndarray) -> tuple[list[Message], np.ndarray | None]:
        """The same of those who have seen so much of each column, (n, columns); whose is which."""
        if not self._events:
            return [{}], None
        return [self._join(self._known(row)) for row in seen], np.arange(len(seen))

    def view(self, agents: np.ndarray) -> tuple[list[Message], np.ndarray | None]:
        """What agents know of clusters: messages, and whose is which, None if there is one."""
        if not self._events:
            return [{}], None
        if self._version != self.order.version:
            self._views.clear()
            self._version = self.order.version
        kept = self._views.get(id(agents))
        if kept is not None:
            return kept[1], kept[2]
        tables, which = self.order.view(agents)
        bases = [self._known(row) for row in tables]
        messages: list[Message] = []
        places: dict[int, int] = {}
        whose = np.zeros(len(agents), np.intp)
        made: dict[tuple[int, int], int] = {}
        for i, agent in enumerate(agents.tolist()):
            own = self._messages.get(agent)
            table = 0 if which is None else int(which[i])
            key = table, id(own[-1]) if own else 0
            if key not in made:
                message = self._join(bases[table] + own[-1:] if own else bases[table])
                if id(message) not in places:
                    places[id(message)] = len(messages)
                    messages.append(message)
                made[key] = places[id(message)]
            whose[i] = made[key]
        if len(self._views) >= _VIEWS:
            self._views.clear()
        found = messages, whose if len(messages) > 1 else None
        self._views[id(agents)] = agents, *found
        return found
