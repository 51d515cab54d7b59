"""Which clusters of a grid run at once, and whose turn it is.

As many as are resident start together and take turns; the next one starts when one of them is over,
or takes so long that it may be spinning on what others will write. Which of them runs, and how far,
is the hardware's choice: under the policies eager and late they take equal turns, under random the
seed draws how many there are, who is next and for how long.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import numpy as np

from .cluster import Cluster
from .launch import Launch, Settings
from .livelock import Circles
from .machine import Deadlock, State

__all__ = ["run_grid"]

_TOGETHER = 2  # clusters that run at once, unless the device says otherwise
_MOST_ROUNDS = 16  # of a turn under the policy random; otherwise it has one
_PATIENCE = 16  # times that of a cluster, before it makes room: it may be spinning
_UNDER_WAY = 128  # clusters that have started and are not over, at most


class _Turns:
    """How many clusters run at once, which is next, and for how many rounds."""

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


def run_grid(launch: Launch, code: Any, first: int, step: int) -> None:
    """Run every ``step``-th cluster, from ``first`` on."""
    counts = [-(-g // c) for g, c in zip(launch.grid, launch.cluster, strict=True)]
    for z, y, x in itertools.islice(np.ndindex(*reversed(counts)), first, None, step):
        launch.waiting.append((x, y, z))
    turns = _Turns(launch.settings, first)
    running: list[tuple[Cluster, int]] = []  # with the laps after which they make room
    apart: deque[Cluster] = deque()  # they have made room
    circles = Circles(launch, first)

    def start() -> Cluster | None:
        if launch.waiting and len(running) + len(apart) < _UNDER_WAY:
            return Cluster(launch, code, launch.waiting.popleft())
        return apart.popleft() if apart else None

    while True:
        while len(running) < turns.together and (cluster := start()):
            running.append((cluster, cluster.laps + _PATIENCE * cluster.patience))
        if not running:
            return
        at, rounds = turns.next(len(running))
        cluster, limit = running[at]
        state = cluster.run(rounds)
        if state is State.STUCK:
            raise Deadlock(f"deadlock: nothing can move\n  {cluster.report()}")
        if state is State.DONE or cluster.laps >= limit:
            del running[at]
            if state is State.RUNNING:
                apart.append(cluster)
        if circles.closed(cluster, len(running) + len(apart)):
            started = [*(each for each, _ in running), *apart]
            reports = "\n  ".join(each.report() for each in started)
            raise Deadlock(
                f"deadlock: threads spin, and nobody changes what they read\n  {reports}"
            )
