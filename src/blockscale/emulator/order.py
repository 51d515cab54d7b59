"""Who happens before whom: vector clocks over the warps of a cluster and its asynchronous work.

An agent is a warp, or a slot of asynchronous work: one slot for each tensor-core pipe, whose work
is in order, and a ring of slots for copies, which are not. Each agent has three rows of knowledge:

- ``SEEN``: accesses that happen before whatever it does next;
- ``FENCED``: those that the asynchronous proxy may rely on, too, because a proxy fence lies between
  (PTX ISA 8.6.1, proxy-preserved base causality order);
- ``STRONG``: what it had seen at its last fence, which is all that a relaxed arrival passes on.

Time of an agent advances with each release, so that what it does afterwards is not covered.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np

__all__ = ["FENCED", "SEEN", "STRONG", "Actor", "Knowledge", "Order"]

SEEN, FENCED, STRONG = 0, 1, 2
_COPIES = 32  # slots of the ring for bulk copies: reuse can only hide a race, never invent one
_PLAIN = 16  # slots of the ring for cp.async, which works in the generic proxy

Knowledge = np.ndarray  # (3, agents) uint32, rows as above


@dataclass(slots=True)
class Actor:
    """A piece of asynchronous work: its slot and time there, and what was known at its issue."""

    slot: int
    time: int
    known: Knowledge
    generic: bool = False  # works in the generic proxy, like ordinary accesses
    strong: bool = False  # its accesses are atomic: no race with other strong ones

    def message(self) -> Knowledge:
        """What those who wait for this work learn."""
        known = self.known.copy()
        known[:, self.slot] = np.maximum(known[:, self.slot], self.time)
        return known


class Order:
    """The clocks of a cluster.

    Args:
        ctas: CTAs of the cluster.
        warps: warps of each.
        programmatic: whether the kernel before is an agent, too: the last one.
    """

    def __init__(self, ctas: int, warps: int, programmatic: bool = False) -> None:
        self.warps = warps
        first = ctas * warps  # the slots come after the warps
        groups = -(-warps // 4)
        self._pipes: dict[Hashable, int] = {}
        self._next_pipe, self._copies = first, first + ctas * (groups + warps)
        self._plain = self._copies + _COPIES
        self.agents = self._plain + _PLAIN + programmatic
        self.predecessor = self.agents - 1 if programmatic else None
        self.known = np.zeros((self.agents, 3, self.agents), np.uint32)
        self.time = np.ones(self.agents, np.uint32)
        own = np.arange(self.agents)
        self.known[own, SEEN, own] = 1
        #: Writers whose accesses the asynchronous proxy sees only after a proxy fence.
        self.is_generic = (own < first) | (own >= self._plain)
        self._turns = {False: 0, True: 0}
        self.flags: dict[Hashable, Knowledge] = {}

    def agents_of(self, rank: int, threads: np.ndarray) -> np.ndarray:
        return rank * self.warps + threads // 32

    # --- ordinary synchronization ---

    def _advance(self, agents: np.ndarray) -> None:
        self.time[agents] += 1
        self.known[agents, SEEN, agents] = self.time[agents]

    def release(self, agents: np.ndarray, relaxed: bool = False) -> Knowledge:
        """What these agents pass on to who acquires it; relaxed: only what a fence precedes."""
        message = self.known[agents].max(axis=0)
        if relaxed:
            message[SEEN] = message[STRONG]
        self._advance(agents)
        return message

    def acquire(self, agents: np.ndarray, message: Knowledge) -> None:
        known = self.known
        known[agents, :STRONG] = np.maximum(known[agents, :STRONG], message[:STRONG])

    def fence(self, agents: np.ndarray, row: int) -> None:
        """A fence: ``row`` (FENCED or STRONG) now holds all that was seen."""
        self.known[agents, row] = np.maximum(self.known[agents, row], self.known[agents, SEEN])
        self._advance(agents)

    def through(self, place: Hashable, agents: np.ndarray, releases: bool) -> None:
        """A strong access to a flag in memory: acquires what was released there before."""
        seen = self.flags.get(place)
        if seen is not None:
            self.acquire(agents, seen)
        if releases:
            message = self.release(agents)
            self.flags[place] = message if seen is None else np.maximum(seen, message)

    # --- asynchronous work ---

    def _issue(self, issuers: np.ndarray) -> Knowledge:
        """What the issuers know; what they do afterwards is not before the work."""
        known: Knowledge = self.known[issuers].max(axis=0)
        self._advance(issuers)
        return known

    def begin(self, issuers: np.ndarray, generic: bool = False, strong: bool = False) -> Actor:
        """A copy, not ordered with any other."""
        base, size = (self._plain, _PLAIN) if generic else (self._copies, _COPIES)
        slot = base + self._turns[generic] % size
        self._turns[generic] += 1
        self.time[slot] += 1
        return Actor(slot, int(self.time[slot]), self._issue(issuers), generic, strong)

    def follow(self, issuers: np.ndarray, pipe: Hashable) -> Actor:
        """Work in a pipe: it knows of all earlier work there."""
        slot = self._pipes.get(pipe)
        if slot is None:
            slot = self._pipes[pipe] = self._next_pipe
            self._next_pipe += 1
            if slot >= self._copies:
                raise ValueError(f"no slot for the pipe {pipe!r}")
        self.time[slot] += 1
        known = self.known[slot]
        np.maximum(known, self._issue(issuers), out=known)
        known[:, slot] = self.time[slot]
        return Actor(slot, int(self.time[slot]), known.copy())

    def join(self, messages: Iterable[Knowledge]) -> Knowledge:
        joined = np.zeros((3, self.agents), np.uint32)
        for message in messages:
            np.maximum(joined, message, out=joined)
        return joined
