"""Finds launches that go round in circles: every thread that can move spins on what nobody changes.

Whoever spins moves, so no turn is the last. But what a cluster does depends on its own state, on
global memory and on the clock alone: once it is as it was some turns before, and nobody has changed
the others meanwhile, it will be so again and again. Nothing is looked at before many
instructions have run while no wait ended, no thread exited and no copy completed; from then on time
does not pass with what it does, either (see ``clock``).

Where all go round in circles, or sleep, somebody may go by the clock: then time leaps, to where the
first one wakes up, or ever further while nothing else happens, and what was suspended on an
mbarrier gives up. That takes no more than seconds, whatever the time-out of a kernel is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from ..machine.state import CTA, Fragment, State
from .cluster import Cluster
from .launch import Launch

__all__ = ["LivelockDetector"]

_FIRST_LEAP = 1 << 10  # ns; each is twice the one before
_LAST_LEAP = 1 << 42  # more than an hour: nobody waits for that


class _Circle:
    """Brent's search for a cycle of one cluster: its state is compared with one before, which is
    replaced after 1, 2, 4, 8 ... turns."""

    def __init__(self) -> None:
        self._before: list[Any] = []
        self._age, self._replaced = 0, 1
        self.began = 0  # the engine's tick at that state

    def closed(self, cluster: Cluster) -> bool:
        state = _state(cluster)
        if self._before and all(a == b for a, b in zip(self._before, state, strict=True)):
            return True
        self._age += 1
        if self._age >= self._replaced:
            self._before, self.began = list(_state(cluster)), cluster.engine.tick
            self._age, self._replaced = 0, 2 * self._replaced
        return False


class LivelockDetector:
    """Looks at what runs together after every turn of a cluster.

    Args:
        launch: one of those; they have the same memory and clock.
        process: the number of this one, where several run clusters of the launch.
    """

    def __init__(self, launch: Launch, process: int) -> None:
        self._memory, self._clock, self.peers = launch.memory, launch.clock, launch.peers
        self._process = process
        self._outside: Any = None  # what clusters depend on besides their own state and the clock
        self._circles: dict[Cluster, _Circle] = {}
        self._closed: dict[Cluster, bool] = {}  # and whether they go by the clock
        self._waited: dict[Cluster, list[Any]] = {}  # states in which all threads waited
        self._moved: dict[Cluster, int] = {}  # when something else happened in each
        self._seen_at = 0  # when they were looked at
        self._leap = _FIRST_LEAP

    def closed(self, cluster: Cluster, state: State, started: int, more: bool) -> bool:
        """Whether none of the clusters that have started will ever do anything else.

        Args:
            cluster: whose turn it was, and how it stands.
            started: how many have, and are not over.
            more: whether others will start.
        """
        if state is State.DONE:
            self._moved.pop(cluster, None)
            self._waited.pop(cluster, None)
            self._forget(cluster)
            return False
        idle = state is State.IDLE
        if self._moved.get(cluster) != cluster.engine.moved:
            self._moved[cluster] = cluster.engine.moved
            self._leap = _FIRST_LEAP
        if not idle and (cluster.engine.flying or not cluster.engine.quiet):
            self._forget(cluster)
            return False
        self._look_at(cluster, idle)
        over, wakes = len(self._closed) == started, self._wakes()
        leaps = not more and self._may_leap()
        if self.peers is not None:
            if not over:
                self.peers.moves(self._process)
                return False
            over = self.peers.agree(self._process, self._outside[-1], leaps or bool(wakes))
        return over and self._advance(leaps, wakes) and not more

    def _look_at(self, cluster: Cluster, idle: bool) -> None:
        """Find out whether it sleeps or goes round in circles, and whether it goes by the clock."""
        memory = self._memory
        memory.changes = memory.changes or 0
        outside = memory.changes, self._elsewhere()
        if outside != self._outside:
            self._outside, self._leap = outside, _FIRST_LEAP
            self._circles.clear()
            self._closed.clear()
        self._pass_time()
        if idle:
            self._closed[cluster] = cluster.wake is None and self._by_clock(cluster)
        elif cluster not in self._closed:
            circle = self._circles.setdefault(cluster, _Circle())
            if circle.closed(cluster):
                since = cluster.engine.moved if cluster.may_fail else circle.began
                self._closed[cluster] = cluster.looked >= since

    def _advance(self, leaps: bool, wakes: list[int]) -> bool:
        """Let time pass until somebody moves; whether nobody ever will."""
        if not leaps:
            if wakes:
                self._clock.now = min(wakes)
                self._pass_time()
            return not wakes
        self._clock.now = min([self._clock.now + self._leap, *wakes])
        self._leap *= 2
        for each in [each for each in self._closed if each.may_fail]:
            each.time_passed()
            self._forget(each)
        self._pass_time()
        return False

    def _by_clock(self, cluster: Cluster) -> bool:
        """Whether one of which all threads wait goes by the clock; or counts waits in vain."""
        if cluster.looked >= cluster.engine.moved:
            return True
        state, before = list(_state(cluster)), self._waited.get(cluster)
        self._waited[cluster] = state
        return before is not None and before != state

    def _wakes(self) -> list[int]:
        """When somebody who sleeps wakes up, ns."""
        return [wake for each in self._closed if (wake := each.wake) is not None]

    def _may_leap(self) -> bool:
        """Whether somebody goes by the clock; or will, after a wait in vain."""
        tries = self._leap == _FIRST_LEAP and any(each.may_fail for each in self._closed)
        return self._leap <= _LAST_LEAP and (tries or any(self._closed.values()))

    def _pass_time(self) -> None:
        """Forget who goes by the clock, or has slept enough."""
        now = self._clock.now
        if now != self._seen_at:
            self._seen_at = now
            for each, by_clock in list(self._closed.items()):
                wake = each.wake
                if by_clock or (wake is not None and wake <= now):
                    self._forget(each)

    def _forget(self, cluster: Cluster) -> None:
        self._circles.pop(cluster, None)
        self._closed.pop(cluster, None)

    def _elsewhere(self) -> int:
        """A digest of the memory that other processes write as well."""
        digest = 0
        if self.peers is not None:
            for buffer in self._memory:
                if buffer.writable:
                    digest = zlib.crc32(buffer.data.data, digest)
        return digest


def _state(cluster: Cluster) -> Iterator[Any]:
    """In pieces: what differs soonest comes first."""
    yield [[_place(f) for f in cta.fragments] for cta in cluster.ctas]
    yield [_barriers(cta) for cta in cluster.ctas]
    yield [_registers(cta) for cta in cluster.ctas]
    yield [cta.shared.tobytes() for cta in cluster.ctas]
    yield [cta.tensor.words.tobytes() for cta in cluster.ctas if cta.tensor is not None]


def _place(fragment: Fragment) -> tuple[Any, ...]:
    calls = tuple((id(frame), pc) for frame, pc, _ in fragment.stack)
    threads = fragment.threads.tobytes()
    wait = fragment.wait
    return fragment.pc, id(fragment.frame), calls, threads, fragment.used, wait and wait.until


def _registers(cta: CTA) -> tuple[list[bytes], bytes]:
    rows = [row for frame in cta.frames.values() for row in frame.registers]
    rows += [row for frame in cta.frames.values() for row in frame.variables.values()]
    return [row.tobytes() for row in rows], cta.local.tobytes()


def _barriers(cta: CTA) -> tuple[Any, ...]:
    everywhere = cta.cluster.barrier
    return (
        [(b.phase, b.expected, b.repeats, b.ticket.tobytes()) for b in cta.barriers.values()],
        [(b.phase, b.pending, b.bytes, b.count) for b in cta.mbarriers.values()],
        everywhere and (everywhere.phase, [t.tobytes() for t in everywhere.ticket]),
    )
