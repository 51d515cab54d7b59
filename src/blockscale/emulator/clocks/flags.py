"""Flags, by which threads tell each other what they know: PTX ISA 8.8 and 8.9.

A flag is a scalar in memory that is accessed by strong operations; it is named by its address. A
write of it may end release patterns, which begin with one of three operations of its thread: the
write itself, an earlier release of the same flag, or an earlier fence. Each pattern passes on what
the thread knew at that first operation.

An acquire pattern begins with a strong read of the flag and ends with the same read, if it
acquires, or with a later fence. Its thread learns what a release pattern passes on if the read
observes the write, or a read-modify-write that followed it, and if the first operation of the
release pattern and the last one of the acquire pattern are morally strong.

A thread that has observed a value comes after the write of that value, even if it acquires nothing
(8.9.5).

Flags of shared and of global memory differ in what knowledge is, and in how a thread learns it:
these are their ``Moment`` and their ``Knows``. For fence.sc see ``total_fences``.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from .patterns import LONGEST, Pattern, Threads, Value, Write
from .scopes import Strength, alike
from .total_fences import Knows, TotalFences

__all__ = ["Flags"]

M = TypeVar("M")
#: How many values a thread has read and may still acquire, and how many reads of a flag, are kept.
#: Earlier ones are forgotten: a thread that relies on one of them is accused of a race that is
#: none, but no race is missed.
_KEPT = 1024


class Flags(Generic[M]):
    """The flags of one memory.

    Args:
        widest: the narrowest scope that includes all threads that share the memory.
        knows: what each of these threads knows, and how it learns more.

    Attributes:
        fences: the fence.sc of these threads.
    """

    def __init__(self, widest: int, knows: Knows[M]) -> None:
        self._widest, self._knows = widest, knows
        self.fences = TotalFences(knows)
        self._values: dict[int, Value[M]] = {}
        #: By address and thread: the last release of the flag by the thread with each code. Its
        #: later strong writes of the flag pass that on, too, even if others have written between.
        self._own: dict[tuple[int, int], dict[int, Pattern[M]]] = {}
        #: By thread and address: values that the thread has read, and that a fence may acquire.
        self._heard: dict[int, dict[int, list[Value[M]]]] = {}
        #: By address: chains of values that were read, by whom, when first, and whether who reads
        #: comes after them at once.
        self._reads: dict[int, list[tuple[int, int, int, int, bool]]] = {}
        #: By thread: the patterns that it acquired last. To acquire them again tells it nothing.
        self._taken: dict[int, tuple[Pattern[M], ...]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing was told yet, nor heard."""
        return not (self._values or self._own or self.fences.any)

    def value(self, address: int, write: int) -> Value[M] | None:
        """What a flag holds, if it is what the write of that number left."""
        value = self._values.get(address)
        return value if value is not None and value.write == write else None

    # --- writing ---

    def write(self, address: int, old: int, write: Write[M]) -> None:
        """A strong write of a flag; ``old``: the number of the write before, 0 if that is not
        morally strong with this one."""
        before = self.value(address, old) if write.how.updates else None
        own = self._releases(address, write)
        if not (own or write.tells or self.fences.any or before is not None):
            self._values.pop(address, None)
            return
        if before is not None and before.length > before.limit:
            before = self._shortened(before)
        self._values[address] = Value(
            write.number, write.who, write.how.code, own, before, write.moment
        )

    def _releases(self, address: int, write: Write[M]) -> list[Pattern[M]]:
        """The patterns that a write ends and that begin with a release of the same flag by the same
        thread, itself among them."""
        who, how, make = write.who, write.how, write.moment.everything
        if not write.ordered:
            return [Pattern(who, how.scope, make)] if how.releases else []
        if how.releases:
            kept = self._own.setdefault((address, who.agent), {})
            kept[how.code] = Pattern(who, how.scope, make, write.writes)
        own = self._own.get((address, who.agent), {})
        return [each for code, each in own.items() if alike(code, how.code)]

    def _shortened(self, value: Value[M]) -> Value[M]:
        """One value that stands for a value and all those of its chain."""
        short = Value(value.write, value.who, value.code, value.chain(), None, None)
        short.start = value.start
        short.keep(value.known(self._knows.join))
        short.limit = max(LONGEST, 4 * len(short.patterns))
        return short

    # --- reading ---

    def read(
        self, address: int, threads: Threads, how: Strength, write: int, first: int, event: int
    ) -> None:
        """Threads make a strong read of a flag.

        Args:
            write: the number of the write whose value they read; 0 if that write is not morally
                strong with the read.
            first: the number of the first write of its chain of read-modify-writes.
            event: of the read.
        """
        readers, place = threads
        if write and first:
            self._observe(address, readers, first, write, event)
        if not how.returns:
            return
        value = self.value(address, write)
        for agent in readers if how.acquires and self._heard else ():
            for earlier in self._heard.get(agent, {}).get(address, ()):  # a strong read before
                if alike(earlier.code, how.code):
                    self._acquire(address, Threads([agent], place), earlier, how.scope, event)
        if value is None:
            return
        if how.acquires:
            self._acquire(address, threads, value, how.scope, event)
        else:
            self._executed(threads, value, how.scope)
        self.fences.read(address, readers, value, event)
        if how.acquires and value.told(place, self._widest) == value.told(place, how.scope):
            return
        for agent in readers:
            self._hear(address, agent, value)

    def _executed(self, threads: Threads, value: Value[M], scope: int) -> None:
        """Threads learn by a relaxed read what was executed before: see SharedFlags. Of memory it
        tells nothing."""

    def _observe(
        self, address: int, readers: list[int], first: int, write: int, event: int,
        at_once: bool = False,
    ) -> None:  # fmt: skip
        """Keep that threads have observed the writes of a chain, from ``first`` to ``write``."""
        reads = self._reads.setdefault(address, [])
        last = {each[2]: each for each in reads[-2 * len(readers) :]}
        for agent in readers:
            new = first, write, agent, event, at_once
            before = last.get(agent)
            if before is None or before[1] != write or before[4] < at_once:
                reads.append(new)
        del reads[:-_KEPT]

    def _hear(self, address: int, agent: int, value: Value[M]) -> None:
        """Keep a value that a thread has read: a later fence may acquire it."""
        heard = self._heard.setdefault(agent, {}).setdefault(address, [])
        if heard and heard[-1] is value:
            return
        if heard and value.before is heard[-1]:
            heard.pop()
        heard.append(value)
        del heard[:-_KEPT]

    # --- fences ---

    def acquire(self, threads: Threads, scope: int, event: int) -> None:
        """Threads execute a fence after an event: they acquire what they have read before."""
        if not self._heard:
            return
        agents, place = threads
        whose: dict[int, tuple[int, Value[M], list[int]]] = {}
        for agent in dict.fromkeys(agents):
            heard = self._heard.get(agent)
            for address, values in list((heard or {}).items()):
                left = []
                for value in values:
                    whose.setdefault(id(value), (address, value, []))[2].append(agent)
                    if value.told(place, self._widest) != value.told(place, scope):
                        left.append(value)
                assert heard is not None
                if left:
                    heard[address] = left
                else:
                    del heard[address]
        for address, value, readers in whose.values():
            self._acquire(address, Threads(readers, place), value, scope, event)

    # --- what is known ---

    def _acquire(
        self, address: int, threads: Threads, value: Value[M], scope: int, event: int
    ) -> None:  # fmt: skip
        """Threads learn what the release patterns of a value pass on to an acquire pattern whose
        last operation has that scope."""
        patterns = value.told(threads.place, scope)
        if not patterns:
            return
        lacking = [agent for agent in threads.agents if self._taken.get(agent) != patterns]
        if lacking:
            self._knows.learn(lacking, self.message(patterns))
            self._taken.update(dict.fromkeys(lacking, patterns))
            for each in patterns:
                if each.writes is not None:
                    self._observe(address, lacking, *each.writes, event, True)

    def message(self, patterns: tuple[Pattern[M], ...]) -> M:
        """What these patterns pass on together; the same object for the same patterns."""
        return self.fences.join([each.message() for each in patterns])

    @property
    def were_read(self) -> bool:
        """Whether any thread has observed a value of any flag."""
        return bool(self._reads)

    def observed(self, address: int, write: int, agent: int, began: int) -> bool:
        """Whether a write of a flag comes before what a thread began to do at an event, because the
        thread has observed the value, or has seen a read by another thread that did (8.9.5)."""
        return any(
            first <= write <= last
            and (
                event < began + at_once
                if reader == agent
                else self._knows.saw(agent, reader) >= event
            )
            for first, last, reader, event, at_once in self._reads.get(address, ())
        )
