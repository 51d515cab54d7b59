"""Finds launches that go round in circles: every thread that can move spins on what nobody changes.

Whoever spins moves, so no turn is the last. But what a cluster does depends on its own state, on
global memory and on the clock alone: once it is as it was some turns before, and nobody has changed
the others meanwhile, it will be so again and again. Nothing is looked at before many
instructions have run while no wait ended, no thread exited and no copy completed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from .cluster import Cluster
from .launch import Launch
from .machine import CTA, Fragment

__all__ = ["Circles"]

_QUIET = 1 << 15  # instructions without progress, before states are looked at


class _Circle:
    """Brent's search for a cycle of one cluster: its state is compared with one before, which is
    replaced after 1, 2, 4, 8 ... turns."""

    def __init__(self) -> None:
        self._before: list[Any] = []
        self._age, self._replaced = 0, 1

    def closed(self, cluster: Cluster) -> bool:
        state = _state(cluster)
        if self._before and all(a == b for a, b in zip(self._before, state, strict=True)):
            return True
        self._age += 1
        if self._age >= self._replaced:
            self._before = list(_state(cluster))
            self._age, self._replaced = 0, 2 * self._replaced
        return False


class Circles:
    """Looks at a launch after every turn of a cluster.

    Args:
        process: the number of this one, where several run clusters of the launch.
    """

    def __init__(self, launch: Launch, process: int) -> None:
        self._launch, self._process = launch, process
        self._outside: Any = None  # what clusters depend on besides their own state
        self._circles: dict[Cluster, _Circle] = {}
        self._closed: set[Cluster] = set()

    def closed(self, cluster: Cluster, started: int) -> bool:
        """Whether none of the clusters that have started will ever do anything else.

        Args:
            cluster: whose turn it was.
            started: how many have, and are not over.
        """
        engine, memory = cluster.engine, self._launch.memory
        if engine.flying or engine.tick - engine.moved < _QUIET:
            self._circles.pop(cluster, None)
            self._closed.discard(cluster)
            return False
        memory.changes = memory.changes or 0
        outside = memory.changes, self._launch.ticks, self._elsewhere()
        if outside != self._outside:
            self._outside = outside
            self._circles.clear()
            self._closed.clear()
        if cluster not in self._closed and self._circles.setdefault(cluster, _Circle()).closed(
            cluster
        ):
            self._closed.add(cluster)
        peers, over = self._launch.peers, len(self._closed) == started
        if peers is None:
            return over
        if over:
            return peers.agree(self._process, outside[-1])
        peers.moves(self._process)
        return False

    def _elsewhere(self) -> int:
        """A digest of the memory that other processes write as well."""
        digest = 0
        if self._launch.peers is not None:
            for buffer in self._launch.memory:
                if buffer.writable:
                    digest = zlib.crc32(buffer.data.data, digest)
        return digest


def _state(cluster: Cluster) -> Iterator[Any]:
    """In pieces: what differs soonest comes first."""
    yield cluster.to_patience, [[_place(f) for f in cta.fragments] for cta in cluster.ctas]
    yield [_barriers(cta) for cta in cluster.ctas]
    yield [_registers(cta) for cta in cluster.ctas]
    yield [cta.shared.tobytes() for cta in cluster.ctas]
    yield [cta.tensor.words.tobytes() for cta in cluster.ctas if cta.tensor is not None]


def _place(fragment: Fragment) -> tuple[Any, ...]:
    calls = tuple((id(frame), pc) for frame, pc, _ in fragment.stack)
    threads = fragment.threads.tobytes()
    return fragment.pc, id(fragment.frame), calls, threads, fragment.used, fragment.wait is None


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
