"""What agents know at one moment: kept cheaply, and spelled out only for those who ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .knowledge import FENCED, INITS, PASSED, RUN, SEEN, TENSOR, Knowledge, executed, joined

if TYPE_CHECKING:
    from .order import Order

__all__ = ["Snapshot"]


class Snapshot:
    """Of some agents, each by its number among them.

    Args:
        now: of their own events the last one that counts, if that is not the last of all.
    """

    __slots__ = ("_at_fences", "_fenced", "_inits", "_own", "agents", "now", "tables", "which")

    def __init__(self, order: Order, agents: np.ndarray, now: int | None = None) -> None:
        self.agents, self.now = agents, order.now if now is None else now
        self.tables, self.which = order.tables_of(agents)
        self._at_fences, self._own = order.at_fences(agents)
        self._fenced, self._inits = order.fenced_by(agents)

    def have_fences(self) -> bool:
        """Whether some of them pass on something of memory without releasing it themselves."""
        return bool(np.any(self._own) or np.any(self._inits))

    def has_inits(self, i: int) -> bool:
        """Whether one of them has executed a fence.mbarrier_init."""
        return bool(self._inits[i])

    def fences(self, i: int) -> list[int]:
        """The scopes, counted from CTA, of the fences of one of them that no fence of a wider scope
        came after: what a narrower one passes on, the wider one does, too."""
        found, last = [], 0
        own = self._own[:, i].tolist()
        for fence in range(len(own) - 1, -1, -1):
            if own[fence] > last:
                last = own[fence]
                found.append(fence)
        return found

    def message(self, i: int, fence: int | None = None, relaxed: bool = False) -> Knowledge:
        """What one of them passes on.

        Args:
            i: its number among the agents.
            fence: a scope, counted from CTA: of memory it passes on only what comes before its
                last fence of that scope.
            relaxed: of memory it passes on nothing, only what was executed.
        """
        agent, own = int(self.agents[i]), self.now
        known = self.tables[self.which[i]].copy()
        if relaxed:
            known, own = executed(known), 0
        elif fence is not None:
            run = executed(known)
            tables, which = self._at_fences[fence]
            known, own = tables[which[i]].copy(), int(self._own[fence, i])
            known = joined(known, run)
        known[SEEN, agent] = own
        known[FENCED, agent] = max(known[FENCED, agent], min(own, self._fenced[i]))
        known[INITS, agent] = self._inits[i]
        known[RUN, agent] = self.now
        if len(known) > TENSOR:
            known[PASSED, agent] = own
            known[TENSOR] = 0
        return known
