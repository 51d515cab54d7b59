"""Flags, by which threads tell each other what they know: PTX ISA 8.8 and 8.9.

A place is an address that strong accesses write. Its value comes with release patterns: the write
itself, a release by the same thread there before it, or a fence of that thread before it. An
acquire pattern that observes the value, through read-modify-writes too, learns what each pattern
passes on whose first operation is morally strong with its own last one.

A fence.sc (membar) comes before another in the order of all of them if what it precedes was
observed by what precedes the other: as in __threadfence(); __syncthreads(); and a store of one
thread. What is observed only for other reasons (a write after a read, or after a write) decides
nothing here, though 8.10.6 would allow no other order.

Who has observed a value at some place comes after its write there, whatever it acquires (8.9.5).

Flags of shared and of global memory differ in what knowledge is, and in how it is told: that is
their ``Moment``, and the functions that join and learn it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from .patterns import LONGEST, Moment, Pattern, Totals, Value, Who
from .scopes import Place, Strength, scope_between

__all__ = ["Flags"]

M = TypeVar("M")
_JOINED = 64  # messages of several patterns that are kept
#: Values that a thread has read and may still acquire, and reads of a place. Earlier ones are
#: forgotten: who relies on them after so many more is accused of a race, but none is missed.
_KEPT = 1024


class Flags(Generic[M]):
    """The flags of one memory.

    Args:
        widest: the scope that includes all who share it.
        join: what several messages say.
        learn: threads of one place learn a message.
        seen: the last event of another thread that a thread has seen.
    """

    def __init__(
        self, widest: int, join: Callable[[list[M]], M],
        learn: Callable[[list[int], M], None], seen: Callable[[int, int], int],
    ) -> None:  # fmt: skip
        self._widest, self._join, self._learn, self._seen = widest, join, learn, seen
        self._values: dict[int, Value[M]] = {}
        #: By address and thread: its own releases there, which later strong writes of its own pass
        #: on, too, whoever has written between; by their code, the last of each.
        self._own: dict[tuple[int, int], dict[int, Pattern[M]]] = {}
        #: By thread and address: values that it has read and may acquire.
        self._heard: dict[int, dict[int, list[Value[M]]]] = {}
        #: By address: chains of values that were read, by whom and when first.
        self._reads: dict[int, list[tuple[int, int, int, int]]] = {}
        #: The fence.sc of each thread and scope: their events, and what was known there.
        self._totals: dict[tuple[Who, int], tuple[list[int], list[Moment[M]]]] = {}
        #: Of each thread: events of its reads, and what these decide: see Value.
        self._decided: dict[int, tuple[list[int], list[Totals]]] = {}
        self._joined: dict[tuple[Pattern[M], ...], M] = {}
        self._taken: dict[int, tuple[Pattern[M], ...]] = {}  # the last that each acquired

    @property
    def is_idle(self) -> bool:
        """Whether nothing was told yet, nor heard."""
        return not (self._values or self._own or self._totals)

    def value(self, address: int, write: int) -> Value[M] | None:
        """What a place holds, if that write was the last there."""
        value = self._values.get(address)
        return value if value is not None and value.write == write else None

    # --- writing ---

    def write(
        self, address: int, who: Who, how: Strength, old: int, write: int, moment: Moment[M],
        ordered: bool = True,
    ) -> None:  # fmt: skip
        """A strong write.

        Args:
            old: the number of the write before at this place; 0 if it is not morally strong with
                this one.
            write: that of this one.
            ordered: whether it stands in the program of its thread: not so work.
        """
        before = self.value(address, old) if how.updates else None
        patterns = self._patterns(address, who, how, moment, ordered)
        decided = self._before(moment) if self._totals else {}
        if before is not None:
            if before.decided:
                decided = _latest(before.decided, decided)
            if before.length > before.limit:
                before = self._shortened(before)
        if patterns or decided or before is not None:
            self._values[address] = Value(write, who, how.code, patterns, before, decided)
        else:
            self._values.pop(address, None)

    def _patterns(
        self, address: int, who: Who, how: Strength, moment: Moment[M], ordered: bool
    ) -> list[Pattern[M]]:
        if not ordered:
            return [Pattern(who, how.scope, moment.everything)] if how.releases else []
        if how.releases:
            own = self._own.setdefault((address, who.agent), {})
            own[how.code] = Pattern(who, how.scope, moment.everything)
        own = self._own.get((address, who.agent), {})
        found = [each for code, each in own.items() if code >> 3 == how.code >> 3]
        return found + [Pattern(who, scope, make) for scope, make in moment.at_fences()]

    def _before(self, moment: Moment[M]) -> Totals:
        """Of each thread and scope, how many fence.sc come before."""
        found = {}
        for key, (events, _) in self._totals.items():
            count = bisect_right(events, moment.seen(key[0].agent))
            if count:
                found[key] = count
        return found

    @staticmethod
    def _shortened(value: Value[M]) -> Value[M]:
        """The same in one link."""
        short = Value(value.write, value.who, value.code, value.chain(), None, value.decided)
        short.limit = max(LONGEST, 4 * len(short.patterns))
        return short

    # --- reading ---

    def read(
        self, address: int, readers: list[int], place: Place, how: Strength, write: int, first: int,
        event: int,
    ) -> None:  # fmt: skip
        """Threads of a place make a strong read.

        Args:
            write: the number of the write whose value it is; 0 if it is not morally strong with
                this.
            first: that of the first write of its chain of read-modify-writes.
            event: of the read.
        """
        if write and first:
            self._observe(address, readers, first, write, event)
        if not how.returns:
            return
        value = self.value(address, write)
        for agent in readers if how.acquires and self._heard else ():
            for earlier in self._heard.get(agent, {}).get(address, ()):  # a strong read before
                if earlier.code >> 3 == how.code >> 3:
                    self._acquire([agent], earlier, place, how.scope)
        if value is None:
            return
        if how.acquires:
            self._acquire(readers, value, place, how.scope)
        else:
            self._executed(readers, value, place, how.scope)
        if value.decided:
            for agent in readers:
                self._decides(agent, value, event)
        if how.acquires and value.told(place, self._widest) == value.told(place, how.scope):
            return
        for agent in readers:
            self._hear(address, agent, value)

    def _executed(self, readers: list[int], value: Value[M], place: Place, scope: int) -> None:
        """What a relaxed read tells: nothing of memory."""

    def _observe(
        self, address: int, readers: list[int], first: int, write: int, event: int
    ) -> None:  # fmt: skip
        reads = self._reads.setdefault(address, [])
        last = {agent: last for _, last, agent, _ in reads[-2 * len(readers) :]}
        reads += [
            (first, write, agent, event) for agent in readers if last.get(agent) != write
        ]  # fmt: skip
        del reads[:-_KEPT]

    def _hear(self, address: int, agent: int, value: Value[M]) -> None:
        heard = self._heard.setdefault(agent, {}).setdefault(address, [])
        if heard and heard[-1] is value:
            return
        if heard and value.before is heard[-1]:
            heard.pop()
        heard.append(value)
        del heard[:-_KEPT]

    def _decides(self, agent: int, value: Value[M], event: int) -> None:
        events, kept = self._decided.setdefault(agent, ([], []))
        new = _latest(kept[-1], value.decided) if kept else value.decided
        if not kept or new != kept[-1]:
            events.append(event)
            kept.append(new)

    # --- fences ---

    def acquire(self, agents: Iterable[int], place: Place, scope: int) -> None:
        """A fence: what these threads of a place have read before it is acquired."""
        if not self._heard:
            return
        whose: dict[int, tuple[Value[M], list[int]]] = {}
        for agent in dict.fromkeys(agents):
            heard = self._heard.get(agent)
            for address, values in list((heard or {}).items()):
                left = []
                for value in values:
                    whose.setdefault(id(value), (value, []))[1].append(agent)
                    if value.told(place, self._widest) != value.told(place, scope):
                        left.append(value)
                assert heard is not None
                if left:
                    heard[address] = left
                else:
                    del heard[address]
        for value, readers in whose.values():
            self._acquire(readers, value, place, scope)

    def total(self, agents: Iterable[int], place: Place, scope: int) -> None:
        """A fence.sc: those before it in the order of all of them synchronize with it."""
        agents = list(agents)
        more = bool(self._decided)
        while more:  # what they learn may decide the order of others
            more = False
            for agent in agents:
                decided: Totals = {}
                for reader, (events, kept) in self._decided.items():
                    at = bisect_right(events, self._seen(agent, reader))
                    if at:
                        decided = _latest(decided, kept[at - 1])
                for (who, other), count in decided.items():
                    events, moments = self._totals[who, other]
                    between = scope_between(who.place, place)
                    if (
                        who.agent != agent
                        and min(scope, other) >= between
                        and self._seen(agent, who.agent) < events[count - 1]
                    ):
                        self._learn([agent], moments[count - 1].everything())
                        more = True

    def add_total(self, who: Who, scope: int, event: int, moment: Moment[M]) -> None:
        """A thread has executed a fence.sc at an event."""
        events, moments = self._totals.setdefault((who, scope), ([], []))
        events.append(event)
        moments.append(moment)

    # --- what is known ---

    def _acquire(self, readers: list[int], value: Value[M], place: Place, scope: int) -> None:
        patterns = value.told(place, scope)
        if not patterns:
            return
        lacking = [agent for agent in readers if self._taken.get(agent) != patterns]
        if lacking:
            self._learn(lacking, self.message(patterns))
            self._taken.update(dict.fromkeys(lacking, patterns))

    def message(self, patterns: tuple[Pattern[M], ...]) -> M:
        """What they say; the same for the same ones."""
        if len(patterns) == 1:
            return patterns[0].message()
        found = self._joined.get(patterns)
        if found is None:
            if len(self._joined) >= _JOINED:
                self._joined.clear()
            found = self._joined[patterns] = self._join([each.message() for each in patterns])
        return found

    @property
    def were_read(self) -> bool:
        """Whether any value was."""
        return bool(self._reads)

    def observed(self, address: int, write: int, agent: int, began: int) -> bool:
        """Whether what a thread began to do at an event comes after a write because somebody has
        observed its value before."""
        return any(
            first <= write <= last
            and (event < began if reader == agent else self._seen(agent, reader) >= event)
            for first, last, reader, event in self._reads.get(address, ())
        )


def _latest(one: Totals, other: Totals) -> Totals:
    """Of each thread and scope the larger number."""
    both = dict(one)
    for key, count in other.items():
        both[key] = max(count, both.get(key, 0))
    return both
