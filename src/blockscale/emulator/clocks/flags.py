"""Flags, by which threads tell each other what they know: PTX ISA 8.8 and 8.9.

A place is an address that strong accesses write. Its value comes with release patterns: the write
itself, a release by the same thread there before it, or a fence of that thread before it. An
acquire pattern that observes the value, through read-modify-writes too, learns what each pattern
passes on whose first operation is morally strong with its own last one.

Who has observed a value at some place comes after its write there, whatever it acquires (8.9.5).

Flags of shared and of global memory differ in what knowledge is, and in how it is told: that is
their ``Moment`` and their ``Knows``. For fence.sc see ``total_fences``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from .patterns import LONGEST, Moment, Pattern, Value, Who
from .scopes import Place, Strength
from .total_fences import Knows, TotalFences

__all__ = ["Flags"]

M = TypeVar("M")
#: Values that a thread has read and may still acquire, and reads of a place. Earlier ones are
#: forgotten: who relies on them after so many more is accused of a race, but none is missed.
_KEPT = 1024


class Flags(Generic[M]):
    """The flags of one memory.

    Args:
        widest: the scope that includes all who share it.
        knows: what is known to whom.

    Attributes:
        fences: the fence.sc of those who share it.
    """

    def __init__(self, widest: int, knows: Knows[M]) -> None:
        self._widest, self._knows = widest, knows
        self.fences = TotalFences(knows)
        self._values: dict[int, Value[M]] = {}
        #: By address and thread: its own releases there, which later strong writes of its own pass
        #: on, too, whoever has written between; by their code, the last of each.
        self._own: dict[tuple[int, int], dict[int, Pattern[M]]] = {}
        #: By thread and address: values that it has read and may acquire.
        self._heard: dict[int, dict[int, list[Value[M]]]] = {}
        #: By address: chains of values that were read, by whom, when first, and whether who reads
        #: comes after them at once.
        self._reads: dict[int, list[tuple[int, int, int, int, bool]]] = {}
        self._taken: dict[int, tuple[Pattern[M], ...]] = {}  # the last that each acquired

    @property
    def is_idle(self) -> bool:
        """Whether nothing was told yet, nor heard."""
        return not (self._values or self._own or self.fences.any)

    def value(self, address: int, write: int) -> Value[M] | None:
        """What a place holds, if that write was the last there."""
        value = self._values.get(address)
        return value if value is not None and value.write == write else None

    # --- writing ---

    def write(
        self, address: int, who: Who, how: Strength, old: int, write: int, moment: Moment[M],
        tells: bool = True, ordered: bool = True,
        writes: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """A strong write.

        Args:
            old: the number of the write before at this place; 0 if it is not morally strong with
                this one.
            write: that of this one.
            tells: whether the moment may have fences.
            ordered: whether it stands in the program of its thread: not so work.
            writes: of a scalar of a vector, see Pattern. The other scalars are not before it
                (8.2.4): the moment is that before all of them.
        """
        before = self.value(address, old) if how.updates else None
        own = self._releases(address, who, how, moment, ordered, writes)
        if not (own or tells or self.fences.any or before is not None):
            self._values.pop(address, None)
            return
        if before is not None and before.length > before.limit:
            before = self._shortened(before)
        self._values[address] = Value(write, who, how.code, own, before, moment)

    def _releases(
        self, address: int, who: Who, how: Strength, moment: Moment[M], ordered: bool,
        writes: tuple[int, int] | None,
    ) -> list[Pattern[M]]:  # fmt: skip
        """The releases of a thread itself that a write of its own passes on."""
        if not ordered:
            return [Pattern(who, how.scope, moment.everything)] if how.releases else []
        if how.releases:
            kept = self._own.setdefault((address, who.agent), {})
            kept[how.code] = Pattern(who, how.scope, moment.everything, writes)
        own = self._own.get((address, who.agent), {})
        return [each for code, each in own.items() if code >> 3 == how.code >> 3]

    def _shortened(self, value: Value[M]) -> Value[M]:
        """The same in one link."""
        short = Value(value.write, value.who, value.code, value.chain(), None, None)
        short.start = value.start
        short.keep(value.known(self._knows.join))
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
                    self._acquire(address, [agent], earlier, place, how.scope, event)
        if value is None:
            return
        if how.acquires:
            self._acquire(address, readers, value, place, how.scope, event)
        else:
            self._executed(readers, value, place, how.scope)
        self.fences.read(address, readers, value, event)
        if how.acquires and value.told(place, self._widest) == value.told(place, how.scope):
            return
        for agent in readers:
            self._hear(address, agent, value)

    def _executed(self, readers: list[int], value: Value[M], place: Place, scope: int) -> None:
        """What a relaxed read tells: nothing of memory."""

    def _observe(
        self, address: int, readers: list[int], first: int, write: int, event: int,
        at_once: bool = False,
    ) -> None:  # fmt: skip
        reads = self._reads.setdefault(address, [])
        last = {each[2]: each for each in reads[-2 * len(readers) :]}
        for agent in readers:
            new = first, write, agent, event, at_once
            before = last.get(agent)
            if before is None or before[1] != write or before[4] < at_once:
                reads.append(new)
        del reads[:-_KEPT]

    def _hear(self, address: int, agent: int, value: Value[M]) -> None:
        heard = self._heard.setdefault(agent, {}).setdefault(address, [])
        if heard and heard[-1] is value:
            return
        if heard and value.before is heard[-1]:
            heard.pop()
        heard.append(value)
        del heard[:-_KEPT]

    # --- fences ---

    def acquire(self, agents: Iterable[int], place: Place, scope: int, event: int) -> None:
        """A fence after an event: what these threads of a place have read before it is acquired."""
        if not self._heard:
            return
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
            self._acquire(address, readers, value, place, scope, event)

    # --- what is known ---

    def _acquire(
        self, address: int, readers: list[int], value: Value[M], place: Place, scope: int,
        event: int,
    ) -> None:  # fmt: skip
        patterns = value.told(place, scope)
        if not patterns:
            return
        lacking = [agent for agent in readers if self._taken.get(agent) != patterns]
        if lacking:
            self._knows.learn(lacking, self.message(patterns))
            self._taken.update(dict.fromkeys(lacking, patterns))
            for each in patterns:
                if each.writes is not None:
                    self._observe(address, lacking, *each.writes, event, True)

    def message(self, patterns: tuple[Pattern[M], ...]) -> M:
        """What these patterns pass on; the same message for the same patterns."""
        return self.fences.join([each.message() for each in patterns])

    @property
    def were_read(self) -> bool:
        """Whether any value was."""
        return bool(self._reads)

    def observed(self, address: int, write: int, agent: int, began: int) -> bool:
        """Whether what a thread began to do at an event comes after a write because somebody has
        observed its value before."""
        return any(
            first <= write <= last
            and (
                event < began + at_once
                if reader == agent
                else self._knows.saw(agent, reader) >= event
            )
            for first, last, reader, event, at_once in self._reads.get(address, ())
        )
