"""The clock of a cluster: each access is an event with a number, made at a site."""

from __future__ import annotations

from array import array

import numpy as np

from ..alarms.errors import Site
from .scopes import WEAK

__all__ = ["Events"]


class Events:
    """Numbered as they happen; the kernel before is event 1."""

    def __init__(self) -> None:
        self.now = 1  # the last event
        self._sites: list[Site] = []
        self._numbers: dict[tuple[Site, int], int] = {}
        self._site_of = array("I", [0, 0])  # of each event
        self._loads, self._stores = np.zeros((2, 256), bool)  # by number of the site
        self._codes = np.zeros(256, np.uint8)

    def event(self, site: Site, code: int = WEAK) -> int:
        """A new event: an access made at ``site``; for its code see scopes."""
        number = self._numbers.get((site, code))
        if number is None:
            number = self._numbers[site, code] = len(self._sites)
            self._sites.append(site)
            if number == len(self._codes):
                self._codes, self._loads, self._stores = (
                    np.concatenate([kept, np.zeros_like(kept)])
                    for kept in (self._codes, self._loads, self._stores)
                )
            self._codes[number] = code
            self._loads[number] = site.opcode.startswith(("ld.", "ldu."))
            self._stores[number] = site.opcode.startswith("st.")
        self._site_of.append(number)
        self.now += 1
        return self.now

    def tick(self) -> int:
        """A new event that is no access."""
        self._site_of.append(self._site_of[-1])
        self.now += 1
        return self.now

    def site(self, event: int) -> Site:
        return self._sites[self._site_of[event]]

    def _of(self, events: np.ndarray) -> np.ndarray:
        """Numbers of their sites."""
        return np.asarray(np.frombuffer(self._site_of, np.uint32)[events])

    def are_reads(self, events: np.ndarray) -> np.ndarray:
        """Whether these events, of any shape, are of instructions that read."""
        return np.asarray(~self._stores[self._of(events)])

    def are_writes(self, events: np.ndarray) -> np.ndarray:
        """The same of those that write."""
        return np.asarray(~self._loads[self._of(events)])

    def codes(self, events: np.ndarray) -> np.ndarray:
        """How these accesses were made."""
        return np.asarray(self._codes[self._of(events)])
