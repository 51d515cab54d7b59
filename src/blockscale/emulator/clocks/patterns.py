"""Release patterns, and the values that they come with: PTX ISA 8.8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from .scopes import Place, Strength, morally_strong, scope_between

__all__ = ["LONGEST", "Moment", "Pattern", "Threads", "Value", "Who", "Write"]

M = TypeVar("M")
LONGEST = 64  # links of a chain of read-modify-writes, at least, before it is made shorter


class Who(NamedTuple):
    """A thread: its number among all that share the flags, and where it runs."""

    agent: int
    place: Place


class Threads(NamedTuple):
    """Threads of one CTA: their numbers, as in Who, and where they run."""

    agents: list[int]
    place: Place


class Moment(Protocol[M]):
    """What a thread knows when it writes a flag, or at a fence.sc."""

    def everything(self) -> M: ...

    def at_fences(self) -> list[tuple[int, Callable[[], M]]]:
        """Its last fence of each scope, if there is a release among them, and what it knew then."""


class Pattern(Generic[M]):
    """A release pattern, by its first operation: who made it, with which scope, and what it
    passes on.

    Attributes:
        writes: the numbers of the first write of the chain of its own one, and of that, if they
            are not among what it passes on.
    """

    __slots__ = ("_known", "_make", "scope", "who", "writes")

    def __init__(
        self, who: Who, scope: int, make: Callable[[], M], writes: tuple[int, int] | None = None
    ) -> None:
        self.who, self.scope, self._make, self.writes = who, scope, make, writes
        self._known: list[M] = []

    def message(self) -> M:
        if not self._known:
            self._known.append(self._make())
        return self._known[0]


class Write(NamedTuple, Generic[M]):
    """A strong write of one scalar.

    Attributes:
        number: of the write; that of a later one is larger.
        who: the thread that makes it, or whose work does.
        how: how strong it is.
        moment: what its thread, or its work when it was issued, knew.
        tells: whether the moment may have fences; False saves looking for them.
        ordered: whether it stands in the program of its thread. Work does not: no release or
            fence of the thread is passed on with it.
        writes: of a scalar of a vector, see Pattern. The other scalars are not before it (8.2.4):
            the moment is that before all of them.
    """

    number: int
    who: Who
    how: Strength
    moment: Moment[M]
    tells: bool = True
    ordered: bool = True
    writes: tuple[int, int] | None = None


class Value(Generic[M]):
    """What a flag holds.

    Attributes:
        write: the number of the write that left it; that of a later one is larger.
        who: the thread that made it.
        code: how it was made, see scopes.
        before: the value that it replaced, if it is a read-modify-write; these values are a chain,
            and whoever reads the last one synchronizes with the releases of all (8.8).
        length: how many values the chain has.
        limit: the length at which it is replaced by one value that stands for all.
        moment: what was known at the write; None of a value that stands for a chain.
        start: the number of the first write of the chain.
    """

    __slots__ = (
        "_known", "_own", "_patterns", "_told", "before", "code", "length", "limit", "moment",
        "start", "who", "write",
    )  # fmt: skip

    def __init__(
        self, write: int, who: Who, code: int, own: list[Pattern[M]], before: Value[M] | None,
        moment: Moment[M] | None,
    ) -> None:  # fmt: skip
        self.write, self.who, self.code, self._own = write, who, code, own
        self.before, self.moment = before, moment
        self._patterns: list[Pattern[M]] | None = None
        self.start: int = write if before is None else before.start
        self._known: list[M] | None = None
        self.length: int = 1 if before is None else before.length + 1
        self.limit: int = LONGEST if before is None else before.limit
        self._told: dict[tuple[Place, int], tuple[Pattern[M], ...]] = {}

    def known(self, join: Callable[[list[M]], M]) -> list[M]:
        """What was known at its write and those of its chain, in one message if in any."""
        if self._known is None:
            found: list[M] = []
            at: Value[M] | None = self
            while at is not None and at._known is None:
                found += [] if at.moment is None else [at.moment.everything()]
                at = at.before
            found += [] if at is None or at._known is None else at._known
            self._known = [join(found)] if len(found) > 1 else found
        return self._known

    def keep(self, known: list[M]) -> None:
        """It stands for values at which that was known."""
        self._known = known

    def observed_by(self, code: int, place: Place) -> bool:
        """Whether the write is morally strong with an access elsewhere."""
        return bool(morally_strong(self.code, code, scope_between(self.who.place, place)))

    @property
    def patterns(self) -> list[Pattern[M]]:
        """Those that end with this write."""
        if self._patterns is None:
            self._patterns = self._own
            if self.moment is not None:
                fences = self.moment.at_fences()
                self._patterns = self._own + [Pattern(self.who, *fence) for fence in fences]
        return self._patterns

    def chain(self) -> list[Pattern[M]]:
        """The patterns of all in its chain: of a thread and scope those of the last write, which
        include its earlier ones."""
        found: list[Pattern[M]] = []
        seen: set[tuple[int, int]] = set()
        at: Value[M] | None = self
        while at is not None:
            new = [each for each in at.patterns if (each.who.agent, each.scope) not in seen]
            found += new
            seen.update((each.who.agent, each.scope) for each in new)
            at = at.before
        return found

    def told(self, place: Place, scope: int) -> tuple[Pattern[M], ...]:
        """The patterns that synchronize with an acquire pattern whose last operation has that
        scope."""
        key = place, scope
        if key not in self._told:
            self._told[key] = tuple(
                each
                for each in self.chain()
                if min(each.scope, scope) >= scope_between(each.who.place, place)
            )
        return self._told[key]
