"""Races, and reads of what nobody wrote, in the shared memory of CTAs and in Tensor Memory.

For each cell (a byte or a word) the shadow keeps its last write and, for each agent, its last read
since. An access is a race if one of those is not known to happen before it; both sides are named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .order import FENCED, SEEN, Actor, Knowledge, Order
from .program import PtxError

__all__ = ["CHECKS", "DataRace", "EarlyAccess", "Shadow", "Site", "Uninitialized"]

CHECKS = ("race", "uninitialized", "registers", "tmem_lanes")


class DataRace(PtxError):
    """Two accesses to one place, one of them a write, that nothing orders."""


class EarlyAccess(DataRace):
    """A programmatic launch touches global memory that the kernel before may still use."""


class Uninitialized(PtxError):
    """A read of shared or Tensor Memory that nobody has written."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where in a program an access was made."""

    opcode: str
    line: int
    who: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.opcode} of {self.who}, line {self.line}{self.source}"


class Shadow:
    """What was done to ``cells`` cells of one memory.

    Args:
        name: of the memory, for messages, with ``{}`` for the place.
        cells: their number.
        order: the clocks.
        checks: "race", "uninitialized" or both.
        size: bytes of a cell, for messages.
    """

    def __init__(
        self, name: str, cells: int, order: Order, checks: frozenset[str], size: int = 1
    ) -> None:
        self.name, self.order, self.size = name, order, size
        self.races, self.blanks = "race" in checks, "uninitialized" in checks
        self.writer = np.zeros(cells, np.uint16)
        self.written = np.zeros(cells, np.uint32)  # time of the write, 0: never
        self.write_site = np.zeros(cells, np.uint32)
        self.strong = np.zeros(cells, bool)  # it was an atomic, volatile or ordered access
        self.was_read = np.zeros(cells, bool)  # since that write
        self.reads = np.zeros((cells if self.races else 0, order.agents), np.uint32)
        self.read_site = np.zeros(cells, np.uint32)
        self.sites: list[Site] = []
        self._numbers: dict[Site, int] = {}

    def number(self, site: Site) -> int:
        found = self._numbers.get(site)
        if found is None:
            found = self._numbers[site] = len(self.sites)
            self.sites.append(site)
        return found

    # --- by warps ---

    def read(self, cells: np.ndarray, agents: np.ndarray, site: Site, strong: bool) -> None:
        """Cells (n, k) read by agents (n,); two strong accesses are no race."""
        at = np.ascontiguousarray(agents)[:, None]
        self._blank(cells, site)
        if self.races:
            late = self.written[cells] > self.order.known[at, SEEN, self.writer[cells]]
            if strong:
                late &= ~self.strong[cells]
            if late.any():
                self._race(cells[late][0], "reads", site, "write")
            if strong:
                return
            self.reads[cells, at] = self.order.time[at]
            self.was_read[cells] = True
            self.read_site[cells] = self.number(site)

    def write(
        self, cells: np.ndarray, agents: np.ndarray, site: Site, strong: bool,
        same: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Cells (n, k) written by agents (n,).

        ``same`` (2, n, k): the cell held the value that is written; it holds it afterwards, all
        threads having written. That is no race.
        """
        at = np.ascontiguousarray(agents)[:, None]
        if self.races:
            known = self.order.known
            late = self.written[cells] > known[at, SEEN, self.writer[cells]]
            if strong:
                late &= ~self.strong[cells]
            if same is not None:
                late &= ~same[0]
            if late.any():
                self._race(cells[late][0], "writes", site, "write")
            touched = self.was_read[cells]
            if touched.any():
                who = np.broadcast_to(at, cells.shape)[touched]
                self._after_reads(cells[touched], known[who, SEEN], site)
        self._wrote(cells, at, self.order.time[at], site)
        if self.races and not strong:
            lost = self.writer[cells] != at
            if same is not None:
                lost &= ~same[1]
            if lost.any():
                self._race(cells[lost][0], "writes", site, "write")
        self.strong[cells] = strong

    # --- by asynchronous work ---

    def read_by(self, cells: np.ndarray, actor: Actor, site: Site) -> None:
        self._blank(cells, site)
        if self.races:
            self._after_write(cells, actor, "reads", site)
            if actor.strong:
                return
            self.reads[cells, actor.slot] = actor.time
            self.was_read[cells] = True
            self.read_site[cells] = self.number(site)

    def write_by(self, cells: np.ndarray, actor: Actor, site: Site) -> None:
        if self.races:
            self._after_write(cells, actor, "writes", site)
            touched = cells[self.was_read[cells]]
            if len(touched):
                known = actor.message()[SEEN]
                self._after_reads(touched, known[None], site)
        self._wrote(cells, actor.slot, actor.time, site)
        self.strong[cells] = actor.strong

    def _after_write(self, cells: np.ndarray, actor: Actor, verb: str, site: Site) -> None:
        known = actor.message()
        if not actor.generic:
            fenced = np.where(self.order.is_generic, known[FENCED], known[SEEN])
        else:
            fenced = known[SEEN]
        writer, written = self.writer[cells], self.written[cells]
        late = written > fenced[writer]
        if actor.strong:
            late &= ~self.strong[cells]
        if late.any():
            cell = cells[late][0]
            unordered = self.written[cell] > known[SEEN][self.writer[cell]]
            self._race(cell, verb, site, "write", fence_only=not unordered)

    def _after_reads(self, cells: np.ndarray, known: np.ndarray, site: Site) -> None:
        late = (self.reads[cells] > known).any(axis=-1)
        if late.any():
            self._race(cells[late][0], "writes", site, "read")

    def _wrote(self, cells: np.ndarray, agent: Any, time: Any, site: Site) -> None:
        self.writer[cells], self.written[cells] = agent, time
        self.write_site[cells] = self.number(site)
        if self.races:
            touched = cells[self.was_read[cells]]
            self.reads[touched] = 0
            self.was_read[touched] = False

    def seen(self, cells: np.ndarray, known: Knowledge) -> bool:
        """Whether the last writes to the cells were made, and are known."""
        written = self.written[cells]
        return bool((written > 0).all() and (written <= known[SEEN][self.writer[cells]]).all())

    # --- messages ---

    def _blank(self, cells: np.ndarray, site: Site) -> None:
        if self.blanks:
            blank = self.written[cells] == 0
            if blank.any():
                place = self.name.format(self.place(int(cells[blank].flat[0])))
                raise Uninitialized(f"{site} reads {place}, which nobody has written", site.line)

    def place(self, cell: int) -> str:
        return f"{cell * self.size:#x}"

    def _race(self, cell: Any, verb: str, site: Site, other: str, fence_only: bool = False) -> None:
        cell = int(np.asarray(cell).flat[0])
        sites = self.write_site if other == "write" else self.read_site
        place = self.name.format(self.place(cell))
        if fence_only:
            raise DataRace(
                f"missing fence.proxy.async: {site} {verb} {place} through the asynchronous proxy "
                f"after the ordinary write by {self.sites[sites[cell]]}",
                site.line,
            )
        raise DataRace(
            f"data race: {site} {verb} {place}; nothing orders it after the {other} by "
            f"{self.sites[sites[cell]]}",
            site.line,
        )
