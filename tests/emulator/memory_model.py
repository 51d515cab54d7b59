"""The memory model of the PTX ISA, chapter 8, as relations over the events of one execution.

Nothing of the emulator's clocks is used. Events are memory operations, fences and barriers; who
read from whom is given. Each relation has the section that defines it. What the ISA leaves open:

- a read of several bytes reads the value of a write if all its bytes are of that write;
- work of the asynchronous proxy comes after what its thread did before the issue, and before what
  waits for it; a proxy fence anywhere on the path orders a generic write before it (9.7.13.4),
  and none is asked for after a generic read;
- 8.11.1 is taken to the letter: the read of a red is in no acquire pattern, and decides no order
  of fences either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Event", "Races", "closed", "overlap", "races"]

_SCOPES = {"cta": 1, "cluster": 2, "gpu": 3, "gl": 3, "sys": 4}
_SYNCHRONIZING = ("acquire", "release", "acq_rel", "sc")


@dataclass(eq=False)
class Event:
    """A memory operation on a scalar, a fence or a barrier.

    Attributes:
        thread: its device, cluster, CTA and number there; of work of the asynchronous proxy also
            which one it is.
        line, opcode: where it stands.
        where: the memory, and the bytes there.
        barrier: which one it takes part in, and in which round.
        sources: what it read each byte from, None: from what was there before.
        at: when it was done, in the order of the execution.
    """

    thread: tuple[int, ...]
    line: int
    opcode: str
    where: tuple[object, range] | None = None
    barrier: tuple[object, ...] | None = None
    reads: bool = False
    writes: bool = False
    sources: list[Event | None] = field(default_factory=list)
    at: int = -1

    def __post_init__(self) -> None:
        parts = self.opcode.split(".")
        self.asynchronous = self.opcode.startswith("cp.async.bulk.global.")
        self.fence = parts[0] in ("fence", "membar") and "proxy" not in parts
        self.proxy_fence = self.opcode.startswith("fence.proxy.async")
        atomic = parts[0] in ("atom", "red")
        volatile = "volatile" in parts  # 8.4.2: relaxed, at the scope of the system
        orders = [part for part in parts if part in (*_SYNCHRONIZING, "relaxed")]
        self.strong = self.fence or atomic or volatile or bool(orders)
        given = [_SCOPES[part] for part in parts if part in _SCOPES]
        self.scope = 4 if volatile else given[0] if given else 3  # 9.7.13: .gpu by default
        self.total = self.fence and (parts[0] == "membar" or "sc" in orders)
        both = self.total or "acq_rel" in orders or (self.fence and not orders)
        self.acquires = both or "acquire" in orders
        self.releases = both or "release" in orders
        self.in_acquire_patterns = parts[0] != "red"

    @property
    def source(self) -> Event | None:
        """The write whose value it read."""
        first = self.sources[0] if self.sources else None
        return first if all(each is first for each in self.sources) else None


def overlap(x: Event, y: Event) -> bool:
    """8.2.1."""
    if x.where is None or y.where is None or x.where[0] != y.where[0]:
        return False
    a, b = x.where[1], y.where[1]
    return a.start < b.stop and b.start < a.stop


def _includes(x: Event, y: Event) -> bool:
    """Whether the scope of x includes the thread of y: 8.5."""
    same = (0, 3, 2, 1, 0)[x.scope]  # of device, cluster and CTA
    return x.thread[:same] == y.thread[:same]


def _morally_strong(x: Event, y: Event) -> bool:
    """8.7."""
    if x.asynchronous != y.asynchronous:
        return False
    if x.where is not None and y.where is not None and x.where != y.where:
        return False
    if x.thread == y.thread:
        return True
    return x.strong and y.strong and _includes(x, y) and _includes(y, x)


def _matrix(events: Sequence[Event], related: Callable[[Event, Event], bool]) -> np.ndarray:
    return np.array([[related(x, y) for y in events] for x in events], bool)


def _through(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """What the one relates with something that the other relates on."""
    return np.asarray(first.astype(np.float32) @ second.astype(np.float32) > 0)


def closed(relation: np.ndarray) -> np.ndarray:
    """Its transitive closure."""
    while True:
        more = relation | _through(relation, relation)
        if (more == relation).all():
            return more
        relation = more


@dataclass
class Races:
    """Pairs of events, the earlier one first.

    Attributes:
        pairs: data races, with whether a proxy fence is all that is missing.
        decided: those that are none if every communication decides the order of two fence.sc, not
            only that of a value with who reads it.
        base, causality: the orders of 8.9.5, by the numbers of events.
    """

    pairs: dict[tuple[int, int], bool]
    decided: set[tuple[int, int]]
    base: np.ndarray
    causality: np.ndarray


class _Model:
    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.strong = _matrix(events, _morally_strong)
        self.program = _matrix(events, lambda x, y: x.thread == y.thread and x.line < y.line)
        self.observation = self._observation()
        patterns = self._synchronizes()
        self.start = self.program | self._barriers() | self._issues() | patterns
        self.base = self._with_fences(self.observation & self._in_acquire_patterns())

    def _observation(self) -> np.ndarray:
        """8.9.2."""
        number = {id(event): i for i, event in enumerate(self.events)}
        found = np.zeros_like(self.strong)
        for j, read in enumerate(self.events):
            if read.reads and read.source is not None:
                i = number[id(read.source)]
                found[i, j] = self.strong[i, j]
        atomic = np.array([event.reads and event.writes for event in self.events])
        while True:
            more = found | _through(found & atomic, found)
            if (more == found).all():
                return found
            found = more

    def _in_acquire_patterns(self) -> np.ndarray:
        return np.array([event.in_acquire_patterns for event in self.events])

    def _barriers(self) -> np.ndarray:
        """8.9.4, 2 and 3: what stands before a barrier, and what stands after it."""
        return _matrix(
            self.events,
            lambda x, y: x is not y and x.barrier is not None and x.barrier == y.barrier,
        )

    def _issues(self) -> np.ndarray:
        """8.9.1.1, and waits for the copies of a thread."""

        def related(x: Event, y: Event) -> bool:
            if x.asynchronous and not y.asynchronous and "wait_group" in y.opcode:
                done = not y.opcode.endswith(".read") or not x.writes
                return done and x.thread[:4] == y.thread and x.line < y.line
            return y.asynchronous and x.thread == y.thread[:4] and x.line < y.line

        return _matrix(self.events, related)

    def _synchronizes(self) -> np.ndarray:
        """8.9.4, 4, for the patterns of 8.8."""
        events, found = self.events, np.zeros_like(self.strong)
        releases, acquires = [], []  # (first, write), (read, last)
        for i, x in enumerate(events):
            if x.asynchronous:
                continue
            if x.writes and x.strong and x.releases:
                releases.append((i, i))
            if x.reads and x.strong and x.acquires:
                acquires.append((i, i))
            for j in np.nonzero(self.program[i])[0].tolist():
                y = events[j]
                here = x.where == y.where
                if x.releases and (x.fence or (x.writes and here)) and y.writes and y.strong:
                    releases.append((i, j))
                ends = y.acquires and (y.fence or (y.reads and here))
                if x.reads and x.strong and x.in_acquire_patterns and ends:
                    acquires.append((i, j))
        for x, w in releases:
            for r, y in acquires:
                if self.observation[w, r] and self.strong[x, y]:
                    found[x, y] = True
        return found

    def _with_fences(self, decides: np.ndarray) -> np.ndarray:
        """Base causality order, 8.9.5. Of two fence.sc one precedes the other (8.9.3), and where
        one comes before something that decides and the other after it, the other way round would
        contradict causality (8.10.2, 8.10.6)."""
        before = closed(self.start)
        fences = np.array([event.total for event in self.events])
        pairs = self.strong & fences & fences[:, None] & ~np.eye(len(fences), dtype=bool)
        while pairs.any():
            ordered = pairs & _through(_through(before, decides), before) & ~before
            if not ordered.any():
                break
            before = closed(before | ordered)
        return before

    def _communicates(self) -> np.ndarray:
        """Morally strong operations that conflict, in the order of the execution: 8.9.7."""
        return self.strong & _matrix(
            self.events,
            lambda x, y: overlap(x, y) and (x.writes or y.writes) and x.at < y.at,
        )

    def races(self) -> Races:
        """8.7.1."""
        pairs: dict[tuple[int, int], bool] = {}
        conflicting = _matrix(
            self.events,
            lambda x, y: x.at < y.at and overlap(x, y) and (x.writes or y.writes),
        ) & ~self.strong  # fmt: skip
        causality, base = self._causality(self.base)
        for i, j in np.argwhere(conflicting & ~causality).tolist():
            pairs[i, j] = bool(base[i, j])
        left = set()
        if pairs and any(event.total for event in self.events):
            decides = self.observation | self._communicates()
            decided = self._causality(self._with_fences(decides))[0]
            left = {pair for pair in pairs if decided[pair]}
        return Races(pairs, left, self.base, causality)

    def _causality(self, base: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """8.9.5: causality order, and the same whatever the proxy."""
        generic = np.array([not event.asynchronous for event in self.events])
        writes = np.array([event.writes for event in self.events])
        across = generic[:, None] & ~generic
        fenced = np.zeros_like(base)
        for space in ("shared", "global"):
            fences = [_of_space(event, space) for event in self.events]
            here = [event.where is not None and _space(event) == space for event in self.events]
            fenced |= _through(base & np.array(fences), base) & np.array(here)
        preserved = base & (~across | fenced)
        every = base | _through(self.observation, base)
        causality = preserved | _through(self.observation, preserved)
        return causality | (base & ~writes[:, None]), every  # of reads no proxy fence is asked


def _space(event: Event) -> str:
    assert event.where is not None
    return str(event.where[0][0])  # type: ignore[index]


def _of_space(event: Event, space: str) -> bool:
    """Whether it is a proxy fence of that memory."""
    if not event.proxy_fence:
        return False
    named = event.opcode.removeprefix("fence.proxy.async").lstrip(".").partition("::")[0]
    return named in ("", space)


def races(events: Iterable[Event]) -> Races:
    """The data races of an execution."""
    return _Model(list(events)).races()
