"""Flags in global memory, see ``flags``: knowledge is messages, of clusters and what they did.

A thread is the number of its cluster and its column there, as in ``accesses``.
"""

from __future__ import annotations

from collections.abc import Callable
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

    def seen(self, agent: int) -> int:
        cluster, column = divmod(agent, COLUMNS)
        if cluster == self._member.number:
            return self._shared.seen(column)
        return seen_in(self.everything(), cluster, column)


class WorkMoment:
    """What a work knew at its issue."""

    __slots__ = ("_actor", "_member")

    def __init__(self, member: Member, actor: Actor) -> None:
        self._member, self._actor = member, actor

    def everything(self) -> Message:
        return self._member.message(self._member.order.passed_by(self._actor))

    def at_fences(self) -> list[tuple[int, Callable[[], Message]]]:
        return []

    def seen(self, agent: int) -> int:
        return seen_in(self.everything(), *divmod(agent, COLUMNS))


def moments(member: Member, agents: np.ndarray) -> list[GlobalMoment]:
    """Of agents now."""
    at = Snapshot(member.order, agents)
    return [GlobalMoment(member, SharedMoment(at, i)) for i in range(len(agents))]


class GlobalFlags(Flags[Message]):
    """Those of launches that run together."""

    def __init__(self) -> None:
        super().__init__(SYS, together, self._learns, self._saw)
        self.members: list[Member] = []

    def _learns(self, threads: list[int], message: Message) -> None:
        member = self.members[threads[0] // COLUMNS]
        member.acquire(np.array(threads) % COLUMNS, message)

    def _saw(self, thread: int, other: int) -> int:
        cluster, column = divmod(thread, COLUMNS)
        return self.members[cluster].saw(column, other)
