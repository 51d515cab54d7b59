"""A cluster among those that share global memory: what its agents pass on, and what they learn."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..alarms.errors import Site
from ..clocks.knowledge import SEEN, Actor, Knowledge
from ..clocks.scopes import CTA, Strength
from .messages import THROUGH, Learned, Message, fenced
from .releases import Place, Released, Version, add, released

if TYPE_CHECKING:
    from ..launches.cluster import Cluster
    from ..machine import state as machine

__all__ = ["Member"]

_CTAS = 16  # of a cluster, at most
#: Versions of a place that are kept until a fence. Earlier ones are forgotten: whoever acquires
#: them after so many more is accused of a race, but none is missed.
_HEARD = 1024


class Member:
    """A cluster, by its number."""

    def __init__(self, number: int, cluster: Cluster) -> None:
        assert cluster.order is not None
        self.number, self.order = number, cluster.order
        self.device, self.alarms = cluster.launch.device, cluster.launch.alarms
        self.learned = Learned(self.order)
        #: Of each place and its readers: versions that strong accesses read, with their events.
        self._heard: dict[tuple[int, bytes], tuple[np.ndarray, list[tuple[int, Version]]]] = {}
        #: The last strong read at each site: by whom, of where, which cells and what had written
        #: them, and the last event then.
        self.polls: dict[Site, tuple[np.ndarray, np.ndarray, list[Any], int]] = {}
        self._fences: dict[tuple[int, int], tuple[int, Message]] = {}
        #: Of each agent and scope: events of its fence.sc, and what it passes on there.
        self._totals: dict[tuple[int, int], tuple[list[int], list[Message]]] = {}

    def place(self, rank: int) -> Place:
        return self.number * _CTAS + rank, self.number, self.device

    def place_of(self, agent: int) -> Place:
        return self.place(agent // (self.order.warps * self.order.lanes))

    # --- what agents pass on ---

    def message(self, rows: Knowledge) -> Message:
        """What someone passes on who has these rows of knowledge."""
        known = self.learned.known(rows[SEEN])
        own = np.zeros((THROUGH + 1, rows.shape[1]), np.uint32)
        own[:THROUGH] = rows
        before = known.get(self.number)
        if before is not None:
            own[THROUGH, : before.shape[1]] = before[THROUGH]
        return {**known, self.number: own}

    def _at_fence(self, agent: int, scope: int, at: int) -> Message:
        """What an agent passes on as of its last fence of a scope, at that event."""
        kept = self._fences.get((agent, scope))
        if kept is None or kept[0] != at:
            message = self.message(self.order.passed(agent, scope - CTA))
            kept = self._fences[agent, scope] = at, message
        return kept[1]

    def passes(
        self, agent: int, actor: Actor | None, how: Strength
    ) -> Iterator[tuple[int, Message]]:
        """What a strong write passes on, of an agent or a work, and to which scopes."""
        order = self.order
        if how.releases:
            rows = order.passed(agent) if actor is None else order.passed_by(actor)
            yield how.reach, self.message(rows)
        elif actor is None:
            last = 0
            for scope in range(how.reach, CTA - 1, -1):
                at = order.fenced_at(agent, scope - CTA)
                if at > last:
                    last = at
                    yield scope, self._at_fence(agent, scope, at)

    def total(self, agent: int) -> Released:
        """What was released by each fence.sc that happens before an agent's next access."""
        found: Released = {}
        if self._totals:
            seen = self.order.passed(agent)[SEEN]
            for (other, reach), (events, messages) in self._totals.items():
                at = bisect_right(events, int(seen[other]))
                if at:
                    add(found, released(messages[at - 1], reach, self.place_of(other)))
        return found

    # --- what they learn ---

    def acquire(self, agents: np.ndarray, message: Message, site: Site) -> None:
        """Agents learn what a message says, at a new event."""
        lacking = self.learned.lacking(agents, message) if message else agents[:0]
        if not len(lacking):
            return
        event = self.order.event(site)
        own = message.get(self.number)
        if own is not None:
            self.order.learn(lacking, own[:THROUGH])
        self.learned.add(lacking, event, message)

    def hear(
        self, address: int, agents: np.ndarray, version: Version | None, how: Strength, site: Site
    ) -> None:  # fmt: skip
        """Agents of a CTA read a place by a strong access, and a version of it if it has one."""
        place, key = self.place_of(int(agents[0])), (address, agents.tobytes())
        heard = self._heard.get(key, (agents, []))[1]
        if how.acquires:  # with this read or one before it on the same place
            for _, each in heard:
                self.acquire(agents, each.to(how.reach, place), site)
            if version is not None:
                self.acquire(agents, version.to(how.reach, place), site)
        if version is None or (heard and heard[-1][1] is version):
            return
        if version.total or not how.acquires or version.has_more(how.reach, place):
            kept = [*heard[1 - _HEARD :], (self.order.event(site), version)]
            self._heard[key] = agents, kept

    def fence_proxy(self, w: machine.Fragment) -> None:
        """A proxy fence of global memory."""
        agents, event = w.agents(), self.order.event(w.site())
        known = [fenced(self.message(self.order.passed(agent))) for agent in agents.tolist()]
        for i, message in enumerate(known):  # each of what it knows itself
            self.learned.add(agents[i : i + 1], event, message)

    def fence(
        self, w: machine.Fragment, reach: int, releases: bool, acquires: bool, total: bool
    ) -> None:
        """A fence of memory: acquires what relaxed accesses before it read, and releases to those
        after it.

        ``total``: a fence.sc. One synchronizes with another if that must come later in the order of
        all of them: for what was written after the one was read before the other, by whomever.
        """
        agents, place, site = w.agents(), self.place(w.cta.rank), w.site()
        if acquires:
            self.order.fence_acquire(agents, reach, total)
        for key, (readers, heard) in list(self._heard.items()) if acquires else ():
            here, left = np.isin(readers, agents), []
            for event, version in heard:
                if here.any():
                    self.acquire(readers[here], version.to(reach, place), site)
                if total and version.total:
                    tables, which = self.order.view(agents)
                    known = np.any(tables[:, readers] >= event, axis=1)
                    later = np.isin(agents, readers) | known[0 if which is None else which]
                    self.acquire(agents[later], version.to(reach, place, True), site)
                if version.total or not here.all() or version.has_more(reach, place):
                    left.append((event, version))
            if left:
                self._heard[key] = readers, left
            else:
                del self._heard[key]
        if total:
            event = self.order.event(site)
            for agent in agents.tolist():
                events, messages = self._totals.setdefault((agent, reach), ([], []))
                events.append(event)
                messages.append(self.message(self.order.passed(agent)))
        if releases:
            self.order.fence_release(agents, reach)
