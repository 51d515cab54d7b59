"""The order of all fence.sc (membar): PTX ISA 8.9.3.

One comes before another if what it precedes was observed by what precedes the other, as in
__threadfence(); __syncthreads(); and a store of one thread: the other way round would contradict
causality (8.10.2, 8.10.6). What follows a read, or another write, decides nothing here, though
8.10.6 would allow no other order: who relies on that is accused of a race.

Fences of several threads at once are kept together, and what decides is kept as knowledge: what
the writers of a value had seen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from .knowledge import Joins
from .patterns import Moment, Threads, Value
from .scopes import Place, scope_between

__all__ = ["Knows", "TotalFences"]

M = TypeVar("M")


class Knows(Protocol[M]):
    """What is known to threads: of shared memory or of global."""

    def join(self, messages: list[M]) -> M: ...

    def learn(self, threads: list[int], message: M) -> None:
        """Threads of one place learn a message."""

    def saw(self, thread: int, other: int) -> int:
        """The last event of another thread that a thread has seen."""

    def saw_of(self, thread: int, others: np.ndarray) -> np.ndarray:
        """The same of threads of one cluster, itself not among those it knows of."""

    def told_of(self, message: M, threads: np.ndarray) -> np.ndarray:
        """The last events of threads of one cluster that a message tells of."""

    def alike(self, thread: int) -> Hashable:
        """Threads for which this is equal know the same, but for what they do themselves."""


class _Group(NamedTuple, Generic[M]):
    """Fences that the same threads execute: their events, and what was known at each."""

    threads: np.ndarray
    place: Place
    scope: int
    events: list[int]
    moments: list[Sequence[Moment[M]]]


class TotalFences(Generic[M]):
    """Those of the threads that share a memory.

    Attributes:
        join: what several messages say.
    """

    def __init__(self, knows: Knows[M]) -> None:
        self._knows, self.join = knows, Joins(knows.join)
        self._groups: dict[tuple[bytes, int], _Group[M]] = {}
        #: Of each thread: events of its reads, of where, and the values.
        self._reads: dict[int, tuple[list[int], list[tuple[int, Value[M]]]]] = {}
        #: Of each thread: numbers of its reads, ascending, and what so many decide.
        self._decided: dict[int, tuple[list[int], list[list[M]]]] = {}
        #: By group, number and threads: what these knew at their fences.
        self._known: dict[tuple[int, int, bytes], M] = {}

    @property
    def any(self) -> bool:
        return bool(self._groups)

    def add(
        self, threads: Threads, scope: int, event: int, moments: Sequence[Moment[M]]
    ) -> None:  # fmt: skip
        """Threads execute a fence.sc at an event; ``moments``: what each of them knew then."""
        who, first = np.unique(threads.agents, return_index=True)  # a warp may be one
        moments, key = [moments[i] for i in first.tolist()], (who.tobytes(), scope)
        group = self._groups.setdefault(key, _Group(who, threads.place, scope, [], []))
        group.events.append(event)
        group.moments.append(moments)

    def read(self, address: int, threads: list[int], value: Value[M], event: int) -> None:
        """Threads have read a value at an event."""
        if not self._groups:
            return
        for thread in threads:
            events, values = self._reads.setdefault(thread, ([], []))
            if not values or values[-1][1] is not value:
                events.append(event)
                values.append((address, value))

    def learn(self, threads: Threads, scope: int) -> None:
        """Threads execute a fence.sc: the ones before it in the order synchronize with it."""
        if not self._reads:
            return
        alike: dict[Hashable, list[int]] = {}
        for thread in threads.agents:
            key = ("reads", thread) if thread in self._reads else self._knows.alike(thread)
            alike.setdefault(key, []).append(thread)
        for each in alike.values():
            for _ in range(len(self._groups) + 1):  # what they learn may decide the order of others
                found = self._before(each[0], threads.place, scope)
                if not found:
                    break
                self._knows.learn(each, self.join(found))

    def _before(self, thread: int, place: Place, scope: int) -> list[M]:
        """What was known at fences that come before one of a thread, if some is new to that."""
        decided = self._before_reads(thread)
        if decided is None:
            return []
        found: list[M] = []
        some = False
        for number, group in enumerate(self._groups.values()):
            if min(scope, group.scope) < scope_between(group.place, place):
                continue
            told = self._knows.told_of(decided, group.threads)
            if told.max() < group.events[0]:
                continue
            seen = self._knows.saw_of(thread, group.threads)
            events = np.array([0, *group.events])
            count = np.searchsorted(events[1:], told, "right")
            some |= bool(np.any(events[count] > seen))
            for at in np.unique(count[count > 0]).tolist():
                found.append(self._message(number, group, at - 1, count == at))
        return found if some else []

    def _message(self, number: int, group: _Group[M], at: int, which: np.ndarray) -> M:
        key = number, at, which.tobytes()
        if key not in self._known:
            moments = group.moments[at]
            every = [moments[i].everything() for i in np.flatnonzero(which).tolist()]
            self._known[key] = self._knows.join(every) if len(every) > 1 else every[0]
        return self._known[key]

    def _decides(self, reader: int, count: int) -> list[M]:
        """What the first reads of a thread decide: all that was known at the values."""
        counts, decided = self._decided.setdefault(reader, ([0], [[]]))
        last = bisect_right(counts, count) - 1
        if counts[last] == count:
            return decided[last]
        found = list(decided[last])
        starts: dict[int, int] = {}  # by address: of the chain that earlier values may be of
        for address, value in reversed(self._reads[reader][1][counts[last] : count]):
            if value.write < starts.get(address, value.write + 1):
                starts[address] = value.start
                found += value.known(self._knows.join)
        if len(found) > 1:
            found = [self._knows.join(found)]
        counts.insert(last + 1, count)
        decided.insert(last + 1, found)
        return found

    def _before_reads(self, thread: int) -> M | None:
        """What comes before the values that were read before a thread's fence."""
        found = []
        for reader, (events, _) in self._reads.items():
            at = bisect_right(events, self._knows.saw(thread, reader))
            found += self._decides(reader, at) if at else []
        return self.join(found) if found else None
