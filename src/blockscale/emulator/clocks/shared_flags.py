"""Flags in the shared memory of a cluster, see ``flags``: knowledge is the tables of an order.

Beside memory there is what was executed: a relaxed write tells who reads it that, too (9.7.16.6).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from .flags import Flags
from .knowledge import SEEN, Knowledge, executed
from .patterns import Threads, Value, Who, Write
from .scalars import scalars, whole
from .scopes import CLUSTER, CTA, Place, Strength
from .snapshot import Snapshot

if TYPE_CHECKING:
    from .order import Order

__all__ = ["SharedFlags", "SharedMoment"]


class SharedMoment:
    """What one of the agents of a snapshot knew.

    Args:
        runs: whether to tell what was executed.
    """

    __slots__ = ("_at", "_i", "_runs")

    def __init__(self, at: Snapshot, i: int, runs: bool = False) -> None:
        self._at, self._i, self._runs = at, i, runs

    def everything(self) -> Knowledge:
        return self._at.message(self._i)

    def at_fences(self) -> list[tuple[int, Callable[[], Knowledge]]]:
        at, i = self._at, self._i
        found: list[tuple[int, Callable[[], Knowledge]]] = [
            (fence + CTA, partial(at.message, i, fence)) for fence in at.fences(i)
        ]
        if not found and (self._runs or at.has_inits(i)):
            found.append((CLUSTER, partial(at.message, i, relaxed=True)))
        return found


class _Knows:
    """What the agents of an order know."""

    def __init__(self, order: Order) -> None:
        self.join, self.saw, self._order = order.join, order.saw, order

    def learn(self, threads: list[int], message: Knowledge) -> None:
        self._order.acquire(np.array(threads), message)

    def saw_of(self, thread: int, others: np.ndarray) -> np.ndarray:
        return self._order.table(thread)[SEEN].take(others)

    def told_of(self, message: Knowledge, threads: np.ndarray) -> np.ndarray:
        return message[SEEN].take(threads)

    def alike(self, thread: int) -> int:
        return id(self._order.table(thread))


class SharedFlags(Flags[Knowledge]):
    """The flags of a cluster.

    Args:
        order: its clock.
        ctas: how many CTAs there are.
        runs: whether somebody may ask what was executed: there is Tensor Memory.
    """

    def __init__(self, order: Order, ctas: int, runs: Callable[[], bool]) -> None:
        super().__init__(CLUSTER if ctas > 1 else CTA, _Knows(order))
        self.order, self._runs = order, runs
        self._numbers = count(1)

    def _executed(self, threads: Threads, value: Value[Knowledge], scope: int) -> None:
        patterns = value.told(threads.place, scope) if self._runs() else ()
        if patterns:
            self.order.acquire(np.array(threads.agents), executed(self.message(patterns)))

    def threads(self, agents: np.ndarray) -> Threads:
        """Agents (n,) of one CTA."""
        return Threads(agents.tolist(), Place(self.order.cta_of(int(agents[0])), 0, 0))

    def writes(
        self, where: np.ndarray, agents: np.ndarray, how: Strength, size: int,
        last: np.ndarray | None = None, event: int = 0, first: np.ndarray | None = None,
        began: int = 0,
    ) -> None:  # fmt: skip
        """Each of agents (n,) of a CTA has written ``size`` bytes at its address at an event, after
        the event ``began``.

        ``last`` (n, k): of the words there the events of the writes before, 0 for those that are
        not morally strong with it; ``first``: those of the first writes of their chains. None: no
        event tells the writes there apart.
        """
        runs, (who, place) = self._runs(), self.threads(agents)
        part = last is not None and size > how.width
        at = Snapshot(self.order, agents, began if part else None)
        tells = runs or at.have_fences()
        if last is None and self.is_idle and not (how.releases or tells):
            return
        both = zip(
            scalars(where, size, how.width, last), scalars(where, size, how.width, first),
            strict=True,
        )  # fmt: skip
        for (addresses, words), (_, firsts) in both:
            before = None if words is None else whole(words)
            left = {address: i for i, address in enumerate(addresses.tolist())}
            for i, address in enumerate(addresses.tolist()):
                old, write, writes = 0, event, None
                if before is not None:
                    old = before[i]
                else:
                    old, write = self._last(address, how, place), next(self._numbers)
                if part and firsts is not None:
                    mine = event if left[address] == i else began + 1  # see Shadow
                    writes = (int(firsts[i, 0]) if old and how.updates else mine), mine
                moment = SharedMoment(at, i, runs)
                made = Write(write, Who(who[i], place), how, moment, tells, writes=writes)
                self.write(address, old, made)

    def reads(
        self, where: np.ndarray, agents: np.ndarray, how: Strength, size: int,
        last: np.ndarray | None = None, first: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Each of agents (n,) of a CTA reads ``size`` bytes at its address; ``last`` and ``first``
        as for ``writes``."""
        if last is None and self.is_idle:
            return
        (who, place), event = self.threads(agents), self.order.now + 1
        both = zip(
            scalars(where, size, how.width, last), scalars(where, size, how.width, first),
            strict=True,
        )  # fmt: skip
        for (addresses, words), (_, firsts) in both:
            before = None if words is None else whole(words)
            whose: dict[int, list[int]] = {}
            for i, address in enumerate(addresses.tolist()):
                whose.setdefault(address, []).append(i)
            for address, readers in whose.items():
                write = self._last(address, how, place) if before is None else before[readers[0]]
                chain = int(firsts[readers[0], 0]) if firsts is not None else 0
                threads = Threads([who[i] for i in readers], place)
                self.read(address, threads, how, write, chain, event)

    def _last(self, address: int, how: Strength, place: Place) -> int:
        """The number of the last write of a flag, if a strong access from a place observes it."""
        value = self._values.get(address)
        return value.write if value is not None and value.observed_by(how.code, place) else 0

    def add_totals(self, agents: np.ndarray, scope: int, event: int) -> None:
        """Agents of a CTA have executed a fence.sc at an event."""
        at = Snapshot(self.order, agents)
        moments = [SharedMoment(at, i) for i in range(len(agents))]
        self.fences.add(self.threads(agents), scope, event, moments)
