"""Asynchronous work that needs the shared memory of a CTA, until the CTA knows it is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .order import SEEN

if TYPE_CHECKING:
    from .engine import Work
    from .machine import CTA

__all__ = ["Users"]

_FEW = 64


class Users:
    """The works; a warp that has waited for one knows it, whenever it completes."""

    def __init__(self, cta: CTA) -> None:
        self._cta = cta
        self._works: list[Work] = []
        self._most = _FEW

    def add(self, work: Work) -> None:
        if len(self._works) >= self._most:  # forget those known by now
            cta = self._cta
            assert cta.cluster.order is not None
            first = cta.rank * cta.warps
            known = cta.cluster.order.known[first : first + cta.warps, SEEN].max(axis=0)
            self._works = self.unknown(known)
            self._most = max(_FEW, 2 * len(self._works))
        self._works.append(work)

    def unknown(self, known: np.ndarray) -> list[Work]:
        """Those that are not covered by what is known, the SEEN row of a warp or several."""
        return [
            w for w in self._works if w.actor is not None and w.actor.time > known[w.actor.slot]
        ]
