"""Which clusters of a grid run at once, and whose turn it is; among several launches, too.

As many as are resident start together and take turns; the next one starts when one of them is over,
or may be spinning on what others will write: it takes long, or does nothing that anybody sees.
Which of them runs, and how far, is the hardware's choice: under the policies eager and late they
take equal turns, under random the seed draws how many there are, who is next and for how long. So
it is with launches that run together.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..machine.state import Deadlock, State
from .cluster import Cluster
from .launch import Launch, Settings
from .livelock import LivelockDetector

__all__ = ["run_grids"]

_TOGETHER = 2  # clusters that run at once, unless the device says otherwise
_MOST_ROUNDS = 16  # of a turn under the policy random; otherwise it has one
_PATIENCE = 16  # times that of a cluster, before it makes room: it may be spinning
_RANKS = 1 << 20  # in the place of a process: whose turn it is among launches
#: Multiprocessors of a B200, and what each holds: CTAs, threads and bytes of shared memory.
_SMS, _CTAS, _THREADS, _SHARED = 148, 32, 2048, 228 * 1024


def _under_way(launch: Launch) -> int:
    """Clusters that have started and are not over, at most: as many as a GPU holds."""
    shared = _SHARED // (launch.shared_bytes + 1024)  # 1024 are the system's
    ctas = _SMS * max(1, min(_CTAS, _THREADS // math.prod(launch.block), shared))
    return max(1, ctas // math.prod(launch.cluster))


class _Turns:
    """How many clusters run at once; which of them, or of launches, is next, and how long."""

    def __init__(self, settings: Settings, number: int) -> None:
        self._random = None
        self.together = settings.resident or _TOGETHER
        if settings.completion == "random":
            self._random = np.random.default_rng((settings.seed, number))
            self.together = settings.resident or int(self._random.integers(1, _TOGETHER + 2))
        self._last = -1

    def next(self, count: int) -> tuple[int, int]:
        """Of ``count`` clusters: a place, and rounds."""
        if self._random is not None:
            at, rounds = self._random.integers((count, _MOST_ROUNDS))
            return int(at), int(rounds) + 1
        self._last = (self._last + 1) % count
        return self._last, 1


@dataclass(slots=True)
class _Run:
    """A cluster that takes turns, until it makes room for others."""

    cluster: Cluster
    limit: int  # the laps after which it does
    seen: tuple[Any, ...] = ()  # what others saw of it
    since: int = 0  # laps, when that changed last

    def spins(self) -> bool:
        """Whether it has run for long while no wait ended, no thread exited, no copy completed and
        global memory stayed as it was."""
        cluster, memory = self.cluster, self.cluster.launch.memory
        seen = cluster.engine.moved, memory.changes
        if seen != self.seen:
            self.seen, self.since = seen, cluster.laps
        laps = cluster.laps - self.since
        if memory.changes is None and 2 * laps >= cluster.patience:
            memory.changes = 0
        return laps >= cluster.patience


class _Grid:
    """The clusters of a launch: every ``step``-th, from ``first`` on."""

    def __init__(self, code: Any, first: int, step: int) -> None:
        self.launch: Launch = code.launch
        self._code = code
        launch = self.launch
        places = np.ndindex(*reversed(launch.clusters_along))
        for z, y, x in itertools.islice(places, first, None, step):
            launch.waiting.append((x, y, z))
        self._turns = _Turns(launch.settings, first)
        self._most = _under_way(launch)
        self._running: list[_Run] = []
        self._apart: deque[Cluster] = deque()  # they have made room

    @property
    def started(self) -> list[Cluster]:
        """Those that are not over."""
        return [*(run.cluster for run in self._running), *self._apart]

    @property
    def may_start(self) -> bool:
        """Whether there will be more."""
        under_way = len(self._running) + len(self._apart)
        return bool(self.launch.waiting) and under_way < self._most

    def held_up(self) -> str:
        return (
            f"{len(self.launch.waiting)} of {self.launch.clusters} clusters have not started: "
            f"a GPU holds {self._most} of them at once"
        )

    def fill(self) -> bool:
        """Let as many run as may; whether there are any."""
        while len(self._running) < self._turns.together:
            if self.may_start:
                cluster = Cluster(self.launch, self._code, self.launch.waiting.popleft())
            elif self._apart:
                cluster = self._apart.popleft()
            else:
                break
            self._running.append(_Run(cluster, cluster.laps + _PATIENCE * cluster.patience))
        return bool(self._running)

    def turn(self) -> tuple[Cluster, State]:
        """The turn of one of them."""
        at, rounds = self._turns.next(len(self._running))
        run = self._running[at]
        cluster = run.cluster
        state = cluster.run(rounds)
        if state is State.DONE or run.spins() or cluster.laps >= run.limit:
            del self._running[at]
            if state is not State.DONE:
                self._apart.append(cluster)
        return cluster, state


def run_grids(codes: Sequence[Any], first: int, step: int) -> None:
    """Run the kernels of launches together.

    Args:
        codes: of their entries.
        first, step: which clusters: every ``step``-th, from ``first`` on.

    Raises Deadlock where nothing can move.
    """
    grids = [_Grid(code, first, step) for code in codes]
    launches = [grid.launch for grid in grids]
    at_random = (each.settings for each in launches if each.settings.completion == "random")
    turns = _Turns(next(at_random, launches[0].settings), _RANKS)
    livelock = LivelockDetector(launches[0], first)
    while going := [grid for grid in grids if grid.fill()]:
        at, rounds = turns.next(len(going)) if len(going) > 1 else (0, 1)
        for _ in range(rounds):
            cluster, state = going[at].turn()
            if state is State.STUCK:
                raise Deadlock(f"deadlock: nothing can move\n  {cluster.report()}")
            started = [each for grid in grids for each in grid.started]
            more = any(grid.may_start for grid in grids)
            if livelock.closed(cluster, state, len(started), more):
                lines = [each.report() for each in started]
                lines += [grid.held_up() for grid in grids if grid.launch.waiting]
                reports = "\n  ".join(lines)
                why = "threads spin, and nobody changes what they read"
                if all(each.waits for each in started):
                    why = "nothing can move"
                raise Deadlock(f"deadlock: {why}\n  {reports}")
            if not going[at].fill():
                break
    if livelock.peers is not None:
        livelock.peers.over(first)
