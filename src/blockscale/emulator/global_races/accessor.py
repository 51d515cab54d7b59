"""Who accesses global memory now, and which earlier accesses are known to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..clocks.knowledge import NEVER, SEEN
from ..clocks.lane_copies import Copies
from ..clocks.readers import View, seen_events
from ..clocks.scopes import ASYNC, SCOPE, Strength, morally_strong, needed
from ..machine.engine import Work
from .accesses import COLUMNS
from .messages import THROUGH

if TYPE_CHECKING:
    from ..machine.state import CTA
    from .races import Races

__all__ = ["Accessor"]


class Accessor:
    """Who accesses global memory now, and what is known to it.

    Attributes:
        at: columns, as what is known: (n, 1), or (1, 1) of a work.
        event: of what it does, if that is not a new one.
        view: of its own cluster.
        messages, whose: of others.
        proxy: whether it works in the asynchronous proxy.
        code: see scopes.
        verb: what it does, for messages: "reads", "writes" or "frees".
        began: the first event that is not before it.
    """

    def __init__(self, races: Races, by: Any, how: Strength | None, verb: str) -> None:
        cta: CTA = by.issuer[0] if isinstance(by, Work) else by.cta
        member = cta.cluster.member
        assert member is not None
        self.member, self.cta, self.site = member, cta, by.site()
        self.races, self.verb, order = races, verb, member.order
        self.actor = self.event = None
        copies = None
        if isinstance(by, Work):
            if isinstance(by.actor, Copies):
                copies = by.actor
            else:
                self.actor = by.actor
        self.proxy = self.actor is not None and not self.actor.generic
        self.code = (how.code if how else 0) | self.proxy * ASYNC
        self.began = order.now + 1
        self.whose: np.ndarray | None = None
        if self.actor is not None:
            rows = order.passed_by(self.actor)
            self.at = np.array([[self.actor.column]])
            self.view: View = rows[SEEN : SEEN + 1], None
            self.messages = [member.learned.known(rows[SEEN])]
        elif copies is not None:
            self.at, self.event = copies.columns[copies.reading][:, None], copies.event
            self.view = copies.readers()
            self.messages, self.whose = member.learned.of_rows(self.view[0])
        else:
            agents = by.agents()
            self.at = agents[:, None]
            self.view = order.view(agents)
            self.messages, self.whose = member.learned.view(agents)

    def part(self, chosen: Any) -> Accessor:
        """Some of its threads."""
        if self.actor is not None or isinstance(chosen, slice):
            return self
        part = object.__new__(Accessor)
        part.__dict__.update(self.__dict__)
        part.at = self.at[chosen]
        tables, which = self.view
        part.view = tables, None if which is None else which[chosen]
        part.whose = None if self.whose is None else self.whose[chosen]
        return part

    def _known(self, who: np.ndarray) -> np.ndarray:
        """The last event of each of ``who`` that it has seen."""
        cluster, column = who >> 16, who & (COLUMNS - 1)
        known = seen_events(self.view, column)
        foreign = cluster != self.member.number
        if self.actor is None:
            known[(column == self.at) & ~foreign] = NEVER - 1
        if np.count_nonzero(foreign):
            known[foreign] = 0
            self._look_up(known, cluster, column, foreign, SEEN)
        return known

    def _look_up(
        self, known: np.ndarray, cluster: np.ndarray, column: np.ndarray, wanted: np.ndarray,
        row: int,
    ) -> None:  # fmt: skip
        """What a row of its messages says of those that are wanted."""
        for i, message in enumerate(self.messages):
            mine = wanted if self.whose is None else wanted & (self.whose == i)[:, None]
            for number in np.unique(cluster[mine]).tolist():
                rows = message.get(number)
                if rows is not None:
                    here = mine & (cluster == number)
                    columns = column[here]
                    seen = rows[row].take(columns, mode="clip")
                    known[here] = np.where(columns < rows.shape[1], seen, 0)

    def agent(self, thread: int) -> int:
        """One of its threads, or who issued it."""
        return int(self.at[thread, 0]) if self.actor is None else self.actor.issuer

    def unseen(self, accesses: np.ndarray) -> np.ndarray:
        """Which of them, of any shape with its threads first, nothing orders before it."""
        made = self.races.accesses
        known = self._known(made.who.take(accesses))
        return np.asarray(made.event.take(accesses) > known)

    def races_with(self, accesses: np.ndarray) -> np.ndarray:
        """Which of them, that are not morally strong with it either."""
        late = self.unseen(accesses)
        if self.code & SCOPE and np.count_nonzero(late):
            late &= ~self.morally_strong(accesses)
        return late

    def unfenced(self, accesses: np.ndarray) -> np.ndarray:
        """Which of them a proxy fence is missing after: what threads did, and it does in another
        proxy."""
        made = self.races.accesses
        if not self.proxy:
            return np.zeros(accesses.shape, bool)
        wanted = (accesses > 0) & (made.code.take(accesses) & ASYNC == 0)
        if np.count_nonzero(wanted):
            who, known = made.who.take(accesses), np.zeros(accesses.shape, np.uint32)
            self._look_up(known, who >> 16, who & (COLUMNS - 1), wanted, THROUGH)
            wanted &= made.event.take(accesses) > known
        return wanted

    def morally_strong(self, accesses: np.ndarray) -> np.ndarray:
        """Which of them are with it, to the same bytes."""
        who = self.races.accesses.who.take(accesses)
        cluster, column = who >> 16, who & (COLUMNS - 1)
        between = needed(
            self.member.order.cta_of(column) == self.cta.rank, cluster == self.member.number,
            self.races.devices(cluster) == self.member.device,
        )  # fmt: skip
        code = self.races.accesses.code.take(accesses)
        return np.asarray(morally_strong(code, np.uint8(self.code), between))
