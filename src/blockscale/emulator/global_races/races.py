"""The check "global": accesses to global memory that nothing orders, in launches that run together.

Within a cluster the order of things is that of its vector clocks. Between clusters knowledge passes
through places in global memory (PTX ISA 8.8): a release pattern publishes what its thread knows
with the version of the place that it writes, and an acquire pattern that reads this version learns
it. A scope must include the other thread, else the pattern orders nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..alarms.errors import DataRace, MissingFence, unfenced, unordered
from ..clocks.order import named
from ..clocks.scopes import CLUSTER, CTA, GPU, SYS, Strength
from ..ptx.program import PtxError
from .accesses import ASYNC, COLUMNS, NEVER, STRENGTH, Accesses
from .accessor import Accessor
from .member import Member
from .past import Past
from .releases import Released, Version, add, released

if TYPE_CHECKING:
    from ..clocks.knowledge import Actor
    from ..launches.cluster import Cluster
    from ..memory.buffers import Buffer, GlobalMemory

__all__ = ["Races"]

_MOST_CLUSTERS = 1 << 16  # an access names its cluster and column in 32 bits
_NAMES = {CTA: ".cta", CLUSTER: ".cluster", GPU: ".gpu", SYS: ".sys"}


def _for_both(released: Released, near: bool) -> Released:
    """What an acquire may learn whose scope includes two writers, of one cluster or not."""
    return {key: message for key, message in released.items() if near or key[0] >= GPU}


class Races:
    """What was done to global memory by launches that run together.

    Args:
        memory: theirs.
        cell: bytes that are told apart.
    """

    def __init__(self, memory: GlobalMemory, cell: int) -> None:
        self.memory, self.cell = memory, cell
        self.accesses = Accesses()
        self._naming: list[tuple[int, int, int]] = []  # of each cluster: see named
        self._devices = np.zeros(16, np.uint32)
        self._versions: dict[int, Version] = {}  # by address
        self._own: dict[tuple[int, int], Released] = {}  # there, by each thread's release itself
        self._starts: dict[int, int] = {}  # the first cell of each buffer, by its address
        self._made = False

    def _make(self) -> None:
        """Cells for all buffers, once they are there; pages that nobody touches cost nothing."""
        count = 0
        for buffer in self.memory:
            self._starts[buffer.base] = count
            count += len(buffer.data) // self.cell + 2
        self._written = np.zeros(count, np.uint32)
        self._reads = Past(count, self.accesses)
        self._updates = Past(count, self.accesses)  # strong writes that others followed
        self._made = True

    def enter(self, cluster: Cluster) -> Member:
        """A cluster starts."""
        number, order = len(self._naming), cluster.order
        assert order is not None
        if number >= _MOST_CLUSTERS:
            raise PtxError(f"check global: it tells {_MOST_CLUSTERS} clusters apart, and not more")
        self._naming.append((order.agents, order.warps * order.lanes, order.lanes))
        if number == len(self._devices):
            self._devices = np.concatenate([self._devices, np.zeros_like(self._devices)])
        self._devices[number] = cluster.launch.device
        return Member(number, cluster)

    def devices(self, clusters: np.ndarray) -> np.ndarray:
        return np.asarray(self._devices.take(clusters))

    # --- accesses ---

    def _parts(self, where: np.ndarray, size: int) -> list[tuple[Buffer, Any, np.ndarray]]:
        """Buffers that kernels may write, which of the pieces lie there, and their cells (n, k)."""
        if not self._made:
            self._make()
        found = []
        for buffer, chosen in self.memory.each(where, size):
            if buffer.writable:
                start = self._starts[buffer.base]
                offset = (where[chosen] - np.uint64(buffer.base)).astype(np.int64)
                first = (offset + buffer.base % self.cell) // self.cell + start
                found.append((buffer, chosen, first[:, None] + np.arange(-(-size // self.cell))))
        return found

    def _add(self, by: Accessor, writes: bool) -> np.ndarray:
        """Numbers (n, 1) of the accesses that are made now: one of each thread, or of a work."""
        event, columns, actor = by.event, by.at[:, 0], by.actor
        if event is None:
            event = by.member.order.event(by.site)
        if actor is not None and writes:  # only its issuer learns of it, once it waits
            columns, event = np.array([actor.issuer]), NEVER
        elif actor is not None:
            actor.did(event)
        who = columns.astype(np.uint32) + np.uint32(by.member.number * COLUMNS)
        made = self.accesses.add(who, event, by.site, by.reach | by.proxy * ASYNC)
        if actor is not None and writes:
            actor.stored += made.tolist()
        return made[:, None]

    def read(self, by: Any, where: np.ndarray, size: int, how: Strength | None) -> None:
        """(n,) pieces are read by a fragment or a work."""
        if how is not None and not how.updates and self._polled(by, where):
            return
        parts, who, polled = self._parts(where, size), Accessor(self, by, how), []
        if how is not None and how.returns and self._versions:
            for _, chosen, cells in parts:  # an acquire comes after what it synchronizes with
                self._hear(who.part(chosen), where[chosen], cells[:, 0], how)
            who = Accessor(self, by, how)
        for buffer, chosen, cells in parts:
            part = who.part(chosen)
            last = self._written.take(cells)
            if np.count_nonzero(last):
                self._after_writes(buffer, cells, part, "reads", last)
            if how is None or not how.updates:
                made = self._add(part, False)
                self._reads.add(cells, np.broadcast_to(made, cells.shape), part.unseen)
                polled.append((cells, last))
        if how is not None and not how.updates:
            who.member.polls[who.site] = who.at, where, polled, who.member.order.now

    def _polled(self, by: Any, where: np.ndarray) -> bool:
        """Whether a strong read is as it was the last time, with nothing new in its cluster."""
        member = by.cta.cluster.member
        poll = member.polls.get(by.site())
        if poll is None or poll[3] != member.order.now:
            return False
        return (
            np.array_equal(poll[0][:, 0], by.agents())
            and np.array_equal(poll[1], where)
            and all((self._written.take(cells) == last).all() for cells, last in poll[2])
        )

    def write(
        self, by: Any, where: np.ndarray, size: int, how: Strength | None, same: np.ndarray
    ) -> None:
        """(n,) pieces were written. ``same`` (2, n, size): the byte held the value before, and it
        holds it now that all threads have written."""
        who = Accessor(self, by, how)
        for buffer, chosen, cells in self._parts(where, size):
            part = who.part(chosen)
            kept = np.all(same[:, chosen].reshape(2, *cells.shape, -1), axis=-1)
            last = self._written.take(cells)
            if np.count_nonzero(last):
                self._after_writes(buffer, cells, part, "writes", last, kept[0])
            for at, reads in self._reads.before(cells):
                self._tell(buffer, at, part, part.races_with(reads), "writes", "read", reads)
            self._follow(cells, last, part, how)
            made = self._add(part, True)
            self._written[cells] = made
            if how is None and who.actor is None:
                lost = self._written.take(cells) != made
                lost &= ~kept[1]
                self._tell(buffer, cells, part, lost, "writes", "write", self._written[cells])
            elif how is not None:
                self._publish(part, where[chosen], last[:, 0], self._written[cells[:, 0]], how)

    def waited(self, actors: Iterable[Actor], event: int) -> None:
        """Who issued these has waited for them at an event, and others know of them by it."""
        for actor in actors:
            self.accesses.event[actor.stored] = event

    # --- flags ---

    def _hear(self, by: Accessor, where: np.ndarray, cells: np.ndarray, how: Strength) -> None:
        """Strong reads of places: what was released with what they hold."""
        for address in np.unique(where).tolist():
            version, here = self._versions.get(address), where == address
            access = self._written[cells[here][:1]]
            if version is not None and not (
                int(access[0]) == version.access and self._strong(by, access)
            ):
                version = None
            by.member.hear(address, by.at[here, 0], version, how, by.site)

    def _strong(self, by: Accessor, access: np.ndarray) -> bool:
        """Whether a strong accessor and a write are morally strong."""
        how = self.accesses.how[access] & STRENGTH
        return bool(how[0]) and bool(by.mutual(self.accesses.who[access], how)[0])

    def _publish(
        self, by: Accessor, where: np.ndarray, before: np.ndarray, made: np.ndarray, how: Strength
    ) -> None:
        """Strong writes of places: what is released with what they hold now."""
        who = self.accesses.who
        for i, address in enumerate(where.tolist()):
            agent, old, version = by.agent(i), before[i : i + 1], self._versions.get(address)
            every: Released = {}
            total: Released = {}
            same = version is not None and version.access == int(old[0])
            if version is not None and same and how.updates and self._strong(by, old):
                near = bool(who[old[0]] // COLUMNS == by.member.number)
                every, total = _for_both(version.released, near), _for_both(version.total, near)
            # A release and then another strong write by the same thread is a pattern, too.
            own = self._own.get((address, int(who[made[i]])), {})
            for scope, message in by.member.passes(agent, by.actor, how):
                own = dict(own)
                add(own, released(message, scope, by.member.place_of(agent)))
            if how.releases:
                self._own[address, int(who[made[i]])] = own
            add(every, own)
            add(total, by.member.total(agent))
            if every or total:
                self._versions[address] = Version(int(made[i]), every, total)
            else:
                self._versions.pop(address, None)

    # --- messages ---

    def _after_writes(
        self, buffer: Buffer, cells: np.ndarray, by: Accessor, verb: str, last: np.ndarray,
        kept: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Check an access against the last writes, and strong ones before. ``kept``: cells that
        hold the value already."""
        for at, writes in itertools.chain(((cells, last),), self._updates.before(cells)):
            late = by.races_with(writes)
            if kept is not None:
                late &= ~kept if at is cells else True
            self._tell(buffer, at, by, late, verb, "write", writes)
            self._tell(buffer, at, by, by.unfenced(writes) & ~late, verb, "write", writes, True)

    def _follow(
        self, cells: np.ndarray, last: np.ndarray, by: Accessor, how: Strength | None
    ) -> None:  # fmt: skip
        """Cells are written. A weak write comes after all that was done there, but a strong one is
        no race with others, which those that come later may race with."""
        if how is None:
            self._reads.clear(cells)
            self._updates.clear(cells)
            return
        strong = self.accesses.how.take(last) & STRENGTH > 0
        if np.count_nonzero(strong):
            self._updates.add(cells, np.where(strong, last, 0), by.unseen)

    def _tell(
        self, buffer: Buffer, cells: np.ndarray, by: Accessor, late: np.ndarray, verb: str,
        other: str, accesses: np.ndarray, fence: bool = False,
    ) -> None:  # fmt: skip
        """``by`` accesses cells; those that are ``late`` were accessed before: an alarm for each
        place in the program where they were, for one may be suppressed."""
        if not np.count_nonzero(late):
            return
        sites = np.where(late, self.accesses.site.take(accesses), -1)
        for site in np.unique(sites[late]).tolist():
            self._tell_one(buffer, cells, by, sites == site, verb, other, accesses, fence)

    def _tell_one(
        self, buffer: Buffer, cells: np.ndarray, by: Accessor, late: np.ndarray, verb: str,
        other: str, accesses: np.ndarray, fence: bool,
    ) -> None:  # fmt: skip
        at, access = np.argwhere(late)[0], int(accesses[late][0])
        cell = int(cells[late][0]) - self._starts[buffer.base]
        byte = max(cell * self.cell - buffer.base % self.cell, 0)
        who, earlier = int(self.accesses.who[access]), self.accesses.place(access)
        column = int(by.at[at[0] if len(by.at) > 1 else 0, 0])
        here = by.member.order.named(by.site, column)
        there = named(earlier, who % COLUMNS, *self._naming[who // COLUMNS])
        place = f"byte {byte:#x} of {buffer.name}"
        if fence:
            message = unfenced(here, verb, place, other, there)
            by.member.alarms.tell("global", MissingFence(message, by.site.line), by.site, earlier)
            return
        message = unordered(here, verb, place, other, there)
        how = int(self.accesses.how[access])
        if how & STRENGTH and by.reach:
            narrow = _NAMES[min(how & STRENGTH, by.reach)]
            message += f": the scope {narrow} of one does not include the other"
        elif int(self.accesses.event[access]) == NEVER and how & ASYNC:
            message += ": its thread must wait for it by cp.async.bulk.wait_group without .read"
        by.member.alarms.tell("global", DataRace(message, by.site.line), by.site, earlier)
