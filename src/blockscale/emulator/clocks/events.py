"""The clock of a cluster: each access is an event with a number, made at a site."""

from __future__ import annotations

from array import array

import numpy as np

from ..alarms.errors import Site
from .scopes import WEAK

__all__ = ["Events"]


class Events:
    """The events of a cluster, numbered as they happen; all of the kernel before is event 1."""

    def __init__(self) -> None:
        self.now = 1  # the last event
        self._sites: list[Site] = []
        self._numbers: dict[tuple[Site, int], int] = {}
        self._site_of = array("I", [0, 0])  # of each event
        self._codes = np.zeros(256, np.uint8)  # by number of the site

    def event(self, site: Site, code: int = WEAK) -> int:
        """The number of a new event: an access made at ``site``; for its code see scopes."""
        number = self._numbers.get((site, code))
        if number is None:
            number = self._numbers[site, code] = len(self._sites)
            self._sites.append(site)
            if number == len(self._codes):
                self._codes = np.concatenate([self._codes, np.zeros_like(self._codes)])
            self._codes[number] = code
        self._site_of.append(number)
        self.now += 1
        return self.now

    def tick(self) -> int:
        """The number of a new event that is no access: something was learned."""
        self._site_of.append(self._site_of[-1])
        self.now += 1
        return self.now

    def site(self, event: int) -> Site:
        return self._sites[self._site_of[event]]

    def codes(self, events: np.ndarray) -> np.ndarray:
        """How these accesses, of any shape, were made."""
        return np.asarray(self._codes[np.frombuffer(self._site_of, np.uint32)[events]])
