"""Flags in memory by which the threads of a cluster tell each other: PTX ISA 8.8.

A release pattern (a release, or a fence and a strong write after it) passes on what its thread
knows with the value that it writes; an acquire pattern that reads this value learns it. A relaxed
or volatile access without a fence passes on nothing but that it was executed. Read-modify-writes
hand on what came with the value before. A scope must include the other thread, else nothing passes.

A fence.sc (membar) of any thread is known to a fence.sc that must come after it in the order of all
of them: after a read of what was written after the first, as __threadfence(); __syncthreads(); and
a store of one thread do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .knowledge import Knowledge, executed
from .scopes import CLUSTER, Strength
from .snapshot import Snapshot

if TYPE_CHECKING:
    from .order import Order

__all__ = ["Flags"]

_LONGEST = 64  # links of a chain of read-modify-writes, at least, before it is made shorter
#: Values of one place that a thread has read and not acquired. Earlier ones are forgotten: whoever
#: acquires them after so many more is accused of a race, but none is missed.
_HEARD = 1024


class _Value:
    """A value that a place holds: who wrote it, and what it came with.

    Attributes:
        event: of the write.
        before: the value that a read-modify-write replaced, or its own thread.
    """

    __slots__ = ("_messages", "agent", "before", "cta", "event", "how", "length", "passed", "place")

    def __init__(
        self, event: int, how: Strength, cta: int, agent: int, passed: Snapshot | None, place: int,
        before: _Value | None,
    ) -> None:  # fmt: skip
        self.event, self.how, self.cta, self.agent = event, how, cta, agent
        self.passed, self.place, self.before = passed, place, before
        self.length: int = 1 if before is None else before.length + 1
        self._messages: dict[tuple[int, int], Knowledge | None] = {}

    def strong_with(self, cta: int, reach: int) -> bool:
        """Whether it is morally strong with an access of a CTA."""
        return cta == self.cta or min(reach, self.how.reach) >= CLUSTER

    def chain(self) -> list[_Value]:
        """Those that it stands for: of an agent the last, that includes its earlier ones."""
        found: dict[tuple[int, bool, int], _Value] = {}
        at: _Value | None = self
        while at is not None:
            if at.passed is not None:
                found.setdefault((at.agent, at.how.releases, at.how.reach), at)
            at = at.before
        return list(found.values())

    def to(self, order: Order, cta: int, reach: int) -> Knowledge | None:
        """What an acquire pattern of that scope in a CTA learns."""
        if (cta, reach) not in self._messages:
            found = []
            for each in self.chain():
                if each.passed is not None and each.strong_with(cta, reach):
                    fence = None if each.how.releases else int(each.cta != cta)
                    found.append(each.passed.message(each.place, fence))
            self._messages[cta, reach] = order.join(found) if found else None
        return self._messages[cta, reach]


class Flags:
    """Places of a cluster, by address.

    Args:
        runs: whether somebody may ask what was executed: there is Tensor Memory.
    """

    def __init__(self, order: Order, runs: Callable[[], bool]) -> None:
        self.order, self._runs = order, runs
        self._of_cta = order.warps * order.lanes
        self._values: dict[int, _Value] = {}
        #: By address and agent: the last value that it released. Another strong write by the same
        #: thread after that is a release pattern, too, whoever has written between.
        self._own: dict[tuple[int, int], _Value] = {}
        #: By agent and place: values that it read and has not acquired.
        self._heard: dict[int, dict[int, list[_Value]]] = {}
        #: The last that each agent acquired, and the scope of that.
        self._taken: dict[int, tuple[_Value, int]] = {}
        #: The fence.sc of each agent and scope: their events, and what was known there.
        self._totals: dict[tuple[int, int], tuple[list[int], list[tuple[Snapshot, int]]]] = {}

    def write(
        self, where: np.ndarray, agents: np.ndarray, how: Strength, before: np.ndarray, event: int
    ) -> None:
        """(n,) places were written at an event by agents of a CTA; ``before``: the events of the
        values there."""
        passed = Snapshot(self.order, agents)
        always = how.releases or bool(self._totals) or self._runs()
        passes = np.full(len(agents), always) | passed.has_fences()
        if not (self._values or self._own or passes.any()):
            return
        cta = int(agents[0]) // self._of_cta
        for i, (place, agent, old) in enumerate(
            zip(where.tolist(), agents.tolist(), before.tolist(), strict=True)
        ):
            value = self._values.get(place)
            if value is not None and (
                value.event != old
                or not (agent == value.agent or (how.updates and value.strong_with(cta, how.reach)))
            ):
                value = None
            if value is None:
                value = self._own.get((place, agent))
            if value is not None and value.length > max(_LONGEST, 4 * self.order.agents):
                value = _shortened(value)
            if value is None and not passes[i]:
                self._values.pop(place, None)
                continue
            own = passed if passes[i] else None
            value = self._values[place] = _Value(event, how, cta, agent, own, i, value)
            if how.releases:
                self._own[place, agent] = value

    def read(
        self, where: np.ndarray, agents: np.ndarray, how: Strength, events: np.ndarray
    ) -> None:
        """(n,) places are read by agents of a CTA; ``events``: of the values there."""
        if not self._values or not how.returns:
            return
        cta = int(agents[0]) // self._of_cta
        whose: dict[int, tuple[_Value, int, list[int]]] = {}
        for place, agent, event in zip(
            where.tolist(), agents.tolist(), events.tolist(), strict=True
        ):
            value = self._values.get(place)
            if value is not None and value.event == event and value.strong_with(cta, how.reach):
                whose.setdefault(place, (value, place, []))[2].append(agent)
        for value, place, readers in whose.values():
            if how.acquires:
                for agent in readers:  # a read of the same place before is part of the pattern
                    for earlier in self._heard.get(agent, {}).pop(place, ()):
                        self._learn([agent], earlier, cta, how.reach)
                self._learn(readers, value, cta, how.reach)
                continue
            if self._runs():
                known = value.to(self.order, cta, how.reach)
                if known is not None:
                    self.order.acquire(np.array(readers), executed(known))
            for agent in readers:
                heard = self._heard.setdefault(agent, {}).setdefault(place, [])
                if not heard or heard[-1] is not value:
                    if heard and value.before is heard[-1]:
                        heard.pop()
                    heard[:] = [*heard[1 - _HEARD :], value]

    def total(self, agents: np.ndarray, reach: int, event: int) -> None:
        """Agents execute a fence.sc, at an event."""
        known = Snapshot(self.order, agents)
        for i, agent in enumerate(agents.tolist()):
            events, kept = self._totals.setdefault((agent, reach), ([], []))
            events.append(event)
            kept.append((known, i))

    def _before(self, value: _Value, cta: int, reach: int) -> Knowledge | None:
        """What a fence.sc in a CTA learns that must come after those before a value's writes."""
        found = []
        for each in value.chain():
            for (agent, scope), (events, kept) in self._totals.items():
                includes = agent // self._of_cta == cta or min(scope, reach) >= CLUSTER
                if includes and each.passed is not None:
                    at = bisect_right(events, each.passed.seen(each.place, agent))
                    found += [known.message(place) for known, place in kept[at - 1 : at] if at]
        return self.order.join(found) if found else None

    def acquire(self, agents: np.ndarray, reach: int, total: bool = False) -> None:
        """A fence, ``total``: a fence.sc: what these agents have read before it is acquired."""
        if not self._heard:
            return
        whose: dict[int, tuple[_Value, list[int]]] = {}
        for agent in dict.fromkeys(agents.tolist()):
            heard = self._heard.get(agent)
            for value in [value for values in (heard or {}).values() for value in values]:
                whose.setdefault(id(value), (value, []))[1].append(agent)
            if heard is not None and reach >= CLUSTER:
                del self._heard[agent]
        for value, readers in whose.values():
            cta = readers[0] // self._of_cta
            before = self._before(value, cta, reach) if total else None
            if before is not None:
                self.order.acquire(np.array(readers), before)
            self._learn(readers, value, cta, reach)

    def _learn(self, readers: list[int], value: _Value, cta: int, reach: int) -> None:
        lacking = [agent for agent in readers if not self._has_taken(agent, value, reach)]
        known = value.to(self.order, cta, reach) if lacking else None
        if known is not None:
            self.order.acquire(np.array(lacking), known)
            self._taken.update(dict.fromkeys(lacking, (value, reach)))

    def _has_taken(self, agent: int, value: _Value, reach: int) -> bool:
        taken = self._taken.get(agent)
        return taken is not None and taken[0] is value and taken[1] >= reach


def _shortened(value: _Value) -> _Value:
    """The same with one link for each agent."""
    links: _Value | None = None
    for each in reversed(value.chain()):
        links = _Value(each.event, each.how, each.cta, each.agent, each.passed, each.place, links)
    return _Value(value.event, value.how, value.cta, value.agent, None, 0, links)
