"""A cluster among those that share global memory: what its agents pass on, and what they learn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..alarms.errors import Site
from ..clocks.knowledge import SEEN, Knowledge
from ..clocks.patterns import Threads
from ..clocks.scopes import Place
from ..clocks.snapshot import Snapshot
from .accesses import COLUMNS
from .global_flags import GlobalFlags, moments, seen_in
from .messages import THROUGH, Learned, Message, fenced

if TYPE_CHECKING:
    from ..launches.cluster import Cluster
    from ..machine import state as machine

__all__ = ["Member"]

_CTAS = 16  # of a cluster, at most


class Member:
    """A cluster, by its number.

    Args:
        flags: of global memory.
    """

    def __init__(self, number: int, cluster: Cluster, flags: GlobalFlags) -> None:
        assert cluster.order is not None
        self.number, self.order, self.flags = number, cluster.order, flags
        self.device, self.alarms = cluster.launch.device, cluster.launch.alarms
        self.learned = Learned(self.order)
        self._asked: tuple[Any, Message] = None, {}  # who was asked last, when, and what it knew
        #: The last strong read at each site: by whom, of where, which cells and what had written
        #: them, and the last event then.
        self.polls: dict[Site, tuple[np.ndarray, np.ndarray, list[Any], int]] = {}

    def place(self, rank: int) -> Place:
        """Where the threads of a CTA run, by its rank in the cluster."""
        return Place(self.number * _CTAS + rank, self.number, self.device)

    def threads(self, agents: np.ndarray) -> Threads:
        """Agents (n,) of one CTA."""
        return Threads(self.numbers(agents), self.place(self.order.cta_of(int(agents[0]))))

    def numbers(self, agents: np.ndarray) -> list[int]:
        """Those of its agents among all that share global memory."""
        return (agents.astype(np.int64) + self.number * COLUMNS).tolist()

    # --- what agents pass on ---

    def message(self, rows: Knowledge) -> Message:
        """What someone passes on who has these rows of knowledge."""
        known = self.learned.known(rows[SEEN])
        own = np.zeros((THROUGH + 1, rows.shape[1]), np.uint32)
        own[:THROUGH] = rows[:THROUGH]
        before = known.get(self.number)
        if before is not None:
            own[THROUGH, : before.shape[1]] = before[THROUGH]
        return {**known, self.number: own}

    def saw(self, agent: int, other: int) -> int:
        """The last event of another thread that an agent has seen."""
        cluster, column = divmod(other, COLUMNS)
        if cluster == self.number:
            return self.order.saw(agent, column)
        return seen_in(self.known_to(agent), cluster, column)

    def known_to(self, agent: int) -> Message:
        """What an agent knows of clusters."""
        at = agent, self.order.version, self.order.now
        if self._asked[0] != at:
            self._asked = at, self.learned.known(self.order.passed(agent)[SEEN])
        return self._asked[1]

    # --- what they learn ---

    def acquire(self, agents: np.ndarray, message: Message) -> None:
        """Agents learn what a message says, at a new event."""
        lacking = self.learned.lacking(agents, message) if message else agents[:0]
        if not len(lacking):
            return
        event = self.order.tick()
        own = message.get(self.number)
        if own is not None:
            self.order.learn(lacking, own[:THROUGH])
        self.learned.add(lacking, event, message)

    def fence_proxy(self, w: machine.Fragment) -> None:
        """A proxy fence of global memory."""
        agents, event = w.agents(), self.order.event(w.site())
        known = [fenced(self.message(self.order.passed(agent))) for agent in agents.tolist()]
        for i, message in enumerate(known):  # each of what it knows itself
            self.learned.add(agents[i : i + 1], event, message)

    def fence_acquire(self, agents: np.ndarray, scope: int, total: bool) -> None:
        """A fence of memory acquires what flags told before it; ``total``: a fence.sc."""
        threads = self.threads(agents)
        self.flags.acquire(threads, scope, self.order.now)
        if total:
            self.flags.fences.learn(threads, scope)

    def add_totals(self, agents: np.ndarray, scope: int, event: int) -> None:
        """Agents have executed a fence.sc at an event."""
        at = moments(self, Snapshot(self.order, agents))
        self.flags.fences.add(self.threads(agents), scope, event, at)
