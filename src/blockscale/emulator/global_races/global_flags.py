"""Flags in global memory, see ``flags``: knowledge is messages, of clusters and what they did.

A thread is the number of its cluster and its column there, as in ``accesses``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import numpy as np

from ..clocks.flags import Flags
from ..clocks.knowledge import SEEN, Actor
from ..clocks.scopes import SYS
from ..clocks.shared_flags import SharedMoment
from ..clocks.snapshot import Snapshot
from .accesses import COLUMNS
from .messages import Message, together

if TYPE_CHECKING:
    from .member import Member

__all__ = ["GlobalFlags", "GlobalMoment", "WorkMoment", "moments", "seen_in"]


def seen_in(message: Message, cluster: int, column: int) -> int:
    """The last event of a column of a cluster that a message tells of."""
    rows = message.get(cluster)
    return int(rows[SEEN, column]) if rows is not None and column < rows.shape[1] else 0


class GlobalMoment:
    """What an agent of a member knew."""

    __slots__ = ("_everything", "_member", "_shared")

    def __init__(self, member: Member, shared: SharedMoment) -> None:
        self._member, self._shared = member, shared
        self._everything: Message | None = None

    def everything(self) -> Message:
        if self._everything is None:
            self._everything = self._member.message(self._shared.everything())
        return self._everything

    def at_fences(self) -> list[tuple[int, Callable[[], Message]]]:
        def message(make: Callable[[], np.ndarray]) -> Callable[[], Message]:
            return lambda: self._member.message(make())

        return [(scope, message(make)) for scope, make in self._shared.at_fences()]


class WorkMoment:
    """What a work knew at its issue."""

    __slots__ = ("_actor", "_member")

    def __init__(self, member: Member, actor: Actor) -> None:
        self._member, self._actor = member, actor

    def everything(self) -> Message:
        return self._member.message(self._member.order.passed_by(self._actor))

    def at_fences(self) -> list[tuple[int, Callable[[], Message]]]:
        return []


def moments(member: Member, at: Snapshot) -> list[GlobalMoment]:
    """Of the agents of a snapshot."""
    return [GlobalMoment(member, SharedMoment(at, i)) for i in range(len(at.agents))]


class _Knows:
    """What the threads of all members know."""

    def __init__(self, members: list[Member]) -> None:
        self._members = members

    def join(self, messages: list[Message]) -> Message:
        return together(messages)

    def learn(self, threads: list[int], message: Message) -> None:
        self._members[threads[0] // COLUMNS].acquire(np.array(threads) % COLUMNS, message)

    def saw(self, thread: int, other: int) -> int:
        cluster, column = divmod(thread, COLUMNS)
        return self._members[cluster].saw(column, other)

    def saw_of(self, thread: int, others: np.ndarray) -> np.ndarray:
        cluster, column = divmod(thread, COLUMNS)
        member = self._members[cluster]
        if cluster == others[0] // COLUMNS:
            return member.order.table(column)[SEEN].take(others % COLUMNS)
        return self.told_of(member.known_to(column), others)

    def told_of(self, message: Message, threads: np.ndarray) -> np.ndarray:
        rows = message.get(int(threads[0]) // COLUMNS)
        if rows is None:
            return np.zeros(len(threads), np.uint32)
        return rows[SEEN].take(threads % COLUMNS)

    def alike(self, thread: int) -> Hashable:
        cluster, column = divmod(thread, COLUMNS)
        member = self._members[cluster]
        return thread if member.learned.has(column) else id(member.order.table(column))


class GlobalFlags(Flags[Message]):
    """Those of launches that run together."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        super().__init__(SYS, _Knows(self.members))
