"""Accesses to global memory, by number: who made each, when, where and how."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..alarms.errors import Site
from ..ptx.program import PtxError

__all__ = ["COLUMNS", "Accesses"]

COLUMNS = 1 << 16  # of a cluster; who accesses is a column of a cluster

_MOST = 1 << 31  # numbers from there on are those of nodes: see past
_KINDS = {"who": np.uint32, "event": np.uint32, "site": np.uint32, "code": np.uint8}


class Accesses:
    """Columns of a table with a row for each access of each thread; row 0 is none. For codes see
    ``scopes``."""

    def __init__(self) -> None:
        self.count = 1
        self.who, self.event, self.site, self.code = (
            np.zeros(1 << 12, kind) for kind in _KINDS.values()
        )
        self._sites: list[Site] = []
        self._numbers: dict[Site, int] = {}

    def add(self, who: np.ndarray, event: int, site: Site, code: int) -> np.ndarray:
        """Rows of accesses made at once: their numbers."""
        first, last = self.count, self.count + len(who)
        if last > _MOST:
            raise PtxError(f"check global: it keeps {_MOST} accesses, and not more")
        while last > len(self.who):
            for name in _KINDS:
                column: Any = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        number = self._numbers.get(site)
        if number is None:
            number = self._numbers[site] = len(self._sites)
            self._sites.append(site)
        self.who[first:last], self.event[first:last] = who, event
        self.site[first:last], self.code[first:last] = number, code
        self.count = last
        return np.arange(first, last, dtype=np.uint32)

    def site_of(self, access: int) -> Site:
        return self._sites[int(self.site[access])]
