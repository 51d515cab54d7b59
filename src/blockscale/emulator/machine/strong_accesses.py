"""Strong accesses to the cells of a memory since its last weak write, and what they hide.

A strong access is no race with another one that is morally strong with it (PTX ISA 8.7), so the
last write to a cell does not stand for those before it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..clocks.access import Access, Conflict
from ..clocks.readers import Readers
from ..clocks.scopes import CLUSTER, CTA, SCOPE, alike, morally_strong, width_of_code

if TYPE_CHECKING:
    from ..clocks.order import Order

__all__ = ["StrongAccesses"]


class StrongAccesses:
    """Those to ``cells`` cells of ``size`` bytes.

    Args:
        base: the address of the first one, as flags have it.
    """

    def __init__(self, cells: int, order: Order, size: int, base: int) -> None:
        self._cells, self.order, self._size, self._base = cells, order, size, base
        #: By their code, see scopes, and whether they write, as read-modify-writes do. Those
        #: that are WEAK are writes before strong ones.
        self._kept: dict[tuple[int, bool], Readers] = {}

    def kept(self, code: int, writes: bool) -> Readers:
        if (code, writes) not in self._kept:
            self._kept[code, writes] = Readers(self._cells, self.order)
        return self._kept[code, writes]

    def columns(self) -> list[int]:
        return [column for each in self._kept.values() for column in each.columns().tolist()]

    def clear(self, cells: Any) -> None:
        for each in self._kept.values():
            each.clear(cells)

    def unseen(
        self, access: Access, writes: bool, chosen: np.ndarray | None = None
    ) -> list[Conflict]:  # fmt: skip
        """Of writes, or reads, those that an access has not seen, and races with. ``chosen``: which
        of its cells are meant; None: all."""
        code = access.code
        found, which = [], partial(self.races, code=code, writes=writes)
        for (kept, were_writes), readers in self._kept.items():
            never = code and alike(code, kept) and min(code & SCOPE, kept & SCOPE) >= CLUSTER
            if were_writes == writes and not never:
                found += readers.unseen(access, which, chosen)
        return found

    def races(
        self, events: np.ndarray, columns: np.ndarray, cells: np.ndarray, who: Any, code: int,
        writes: bool = True,
    ) -> np.ndarray:  # fmt: skip
        """Of writes, or reads, that somebody has not seen who accesses the cells with a code, those
        that it races with."""
        kept = self.order.codes(events)
        late = np.ones(events.shape, bool)
        if code:
            late = ~morally_strong(kept, np.uint8(code), self._between(columns, who))
        if writes and self.order.flags.were_read:
            who = np.broadcast_to(who, events.shape)
            for i in np.flatnonzero(late & (kept > 0)).tolist():
                width = width_of_code(int(kept[i]))
                address = self._base | int(cells[i]) * self._size // width * width
                late[i] = not self._observed(address, int(events[i]), int(who[i]))
        return late

    def _observed(self, address: int, write: int, agent: int) -> bool:
        order = self.order
        return agent < order.agents and order.flags.observed(address, write, agent, order.now + 1)

    def _between(self, columns: np.ndarray, who: Any) -> np.ndarray:
        """The scope between owners of columns; that of work is the cluster."""
        order = self.order
        same = (order.cta_of(columns) == order.cta_of(who)) & (columns < order.agents)
        return np.where(same, CTA, CLUSTER)

    def morally_strong(self, events: np.ndarray, columns: np.ndarray, who: Any, code: int) -> Any:
        """Whether accesses are with one that has a code."""
        between = self._between(columns, who)
        return morally_strong(self.order.codes(events), np.uint8(code), between)
