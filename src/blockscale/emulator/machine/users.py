"""Asynchronous work that needs the shared memory of a CTA, until the CTA knows it is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .engine import Work
    from .state import CTA

__all__ = ["Users"]

_FEW = 64


class Users:
    """The works; a thread that has waited for one knows it, whenever it completes."""

    def __init__(self, cta: CTA) -> None:
        self._cta = cta
        self._works: list[Work] = []
        self._most = _FEW

    def add(self, work: Work) -> None:
        if len(self._works) >= self._most:  # forget those known by now
            cta = self._cta
            assert cta.cluster.order is not None
            self._works = self.unknown(cta.cluster.order.seen_by(cta.agents(np.arange(cta.size))))
            self._most = max(_FEW, 2 * len(self._works))
        self._works.append(work)

    def unknown(self, known: np.ndarray) -> list[Work]:
        """Those that are not covered by what is known: the last event of each column."""
        return [
            w for w in self._works if w.actor is not None and (not w.done or w.actor.unknown(known))
        ]

    def columns(self) -> list[int]:
        """Those of the works: they must not be given to others yet."""
        return [c for w in self._works if w.actor is not None for c in w.actor.needed()]
