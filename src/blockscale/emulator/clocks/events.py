"""The clock of a cluster: each access is an event with a number, made at a site."""

from __future__ import annotations

from array import array

import numpy as np

from ..alarms.errors import Site

__all__ = ["Events"]


class Events:
    """Numbered as they happen; the kernel before is event 1."""

    def __init__(self) -> None:
        self.now = 1  # the last event
        self._sites: list[Site] = []
        self._numbers: dict[tuple[Site, bool], int] = {}
        self._site_of = array("I", [0, 0])  # of each event
        self._strong, self._loads, self._stores = np.zeros((3, 256), bool)  # by number of the site

    def event(self, site: Site, strong: bool = False) -> int:
        """A new event: an access made at ``site``."""
        number = self._numbers.get((site, strong))
        if number is None:
            number = self._numbers[site, strong] = len(self._sites)
            self._sites.append(site)
            if number == len(self._strong):
                more = np.zeros(number, bool)
                self._strong, self._loads, self._stores = (
                    np.concatenate([kept, more])
                    for kept in (self._strong, self._loads, self._stores)
                )
            self._strong[number] = strong
            self._loads[number] = site.opcode.startswith(("ld.", "ldu."))
            self._stores[number] = site.opcode.startswith("st.")
        self._site_of.append(number)
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

    def are_strong(self, events: np.ndarray) -> np.ndarray:
        """The same of strong accesses."""
        return np.asarray(self._strong[self._of(events)])
