"""The check "global": accesses to global memory that nothing orders, in launches that run together.

Within a cluster the order of things is that of its vector clocks. Between clusters knowledge passes
with flags (PTX ISA 8.8, see ``flags``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..alarms.errors import DataRace, MissingFence, unfenced, unordered
from ..clocks.knowledge import NEVER
from ..clocks.order import named
from ..clocks.patterns import Threads, Who, Write
from ..clocks.scalars import of_one_write, scalars, whole
from ..clocks.scopes import ASYNC, CLUSTER, CTA, GPU, SCOPE, SYS, Strength, alike, width_of_code
from ..clocks.snapshot import Snapshot
from ..machine.engine import Work
from ..ptx.program import PtxError
from .accesses import COLUMNS, Accesses
from .accessor import Accessor
from .global_flags import GlobalFlags, WorkMoment, moments
from .member import Member
from .past import Past

if TYPE_CHECKING:
    from ..clocks.knowledge import Actor
    from ..clocks.patterns import Moment
    from ..launches.cluster import Cluster
    from ..memory.buffers import Buffer, GlobalMemory
    from .messages import Message

__all__ = ["Races"]

_MOST_CLUSTERS = 1 << 16  # an access names its cluster and column in 32 bits
_NAMES = {CTA: ".cta", CLUSTER: ".cluster", GPU: ".gpu", SYS: ".sys"}


class _Earlier(NamedTuple):
    """Earlier accesses to cells of a buffer; ``kind`` is "read" or "write", for messages.

    ``cells`` and ``accesses`` have one shape, with the threads of a later access first; 0 is none.
    """

    buffer: Buffer
    cells: np.ndarray
    accesses: np.ndarray
    kind: str


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
        self.flags = GlobalFlags()
        self._starts: dict[int, int] = {}  # the first cell of each buffer, by its address
        self._made = False

    def _make(self) -> None:
        """Cells for all buffers, once they are there; pages that nobody touches cost nothing."""
        count = 0
        for buffer in self.memory:
            self._starts[buffer.base] = count
            count += len(buffer.data) // self.cell + 2
        self._written = np.zeros(count, np.uint32)
        self._chained = np.zeros(count, np.uint32)  # the first write of a strong one's chain
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
        member = Member(number, cluster, self.flags)
        self.flags.members.append(member)
        return member

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
        made = self.accesses.add(who, event, by.site, by.code)
        if actor is not None and writes:
            actor.stored += made.tolist()
        return made[:, None]

    def read(self, by: Any, where: np.ndarray, size: int, how: Strength | None) -> None:
        """(n,) pieces are read by a fragment or a work."""
        if how is not None and not how.updates and self._polled(by, where):
            return
        parts, who, polled = self._parts(where, size), Accessor(self, by, how, "reads"), []
        if how is not None and not isinstance(by, Work):
            for _, chosen, cells in parts:  # an acquire comes after what it synchronizes with
                self._hear(who.part(chosen), where[chosen], cells, size, how)
            began, who = who.began, Accessor(self, by, how, "reads")
            who.began = began
        for buffer, chosen, cells in parts:
            part = who.part(chosen)
            last = self._written.take(cells)
            if np.count_nonzero(last):
                self._after_writes(part, _Earlier(buffer, cells, last, "write"))
            if how is None or not how.updates:
                made = self._add(part, False)
                self._reads.add(cells, np.broadcast_to(made, cells.shape), part.unseen, part.code)
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
        self, by: Any, where: np.ndarray, size: int, how: Strength | None, same: np.ndarray,
        verb: str = "writes",
    ) -> None:  # fmt: skip
        """(n,) pieces were written. ``same`` (2, n, size): the byte held the value before, and it
        holds it now that all threads have written."""
        who = Accessor(self, by, how, verb)
        for buffer, chosen, cells in self._parts(where, size):
            part = who.part(chosen)
            kept = np.all(same[:, chosen].reshape(2, *cells.shape, -1), axis=-1)
            last = self._written.take(cells)
            if np.count_nonzero(last):
                self._after_writes(part, _Earlier(buffer, cells, last, "write"), kept[0])
            for at, reads in self._reads.before(cells):
                earlier = _Earlier(buffer, at, reads, "read")
                self._tell(part, earlier, part.races_with(reads))
            self._follow(cells, last, part, how)
            made = self._add(part, True)
            self._written[cells] = made
            if how is None and who.actor is None:
                lost = self._written.take(cells) != made
                lost &= ~kept[1]
                self._tell(part, _Earlier(buffer, cells, self._written[cells], "write"), lost)
            elif how is not None:
                written = self._written.take(cells)
                self._chain(cells, self._strong(part, last), written, how)
                lost = np.any(written != made, axis=1)
                if np.count_nonzero(lost):  # strong ones of several lanes: nobody reads some
                    both, rows = np.broadcast_to(made, cells.shape), part.part(lost)
                    self._updates.add(cells[lost], both[lost], rows.unseen, rows.code)
                if not part.proxy:
                    self._publish(part, where[chosen], last, cells, how, made[:, 0])

    def _chain(
        self, cells: np.ndarray, last: np.ndarray, written: np.ndarray, how: Strength
    ) -> None:
        """A strong write: it begins a chain, or is an update of the last one's value."""
        if not how.updates:
            self._chained[cells] = written
            return
        before = of_one_write(last, max(how.width // self.cell, 1))
        self._chained[cells] = np.where(before > 0, self._chained.take(cells), written)

    def free(self, by: Any, address: int, size: int) -> None:
        """A thread gives a block of the heap back: all that others do there must come before."""
        size = -(-size // self.cell) * self.cell  # there is room between blocks
        never = np.zeros((2, 1, size), bool)
        self.write(by, np.array([address], np.uint64), size, None, never, "frees")

    def waited(self, actors: Iterable[Actor], event: int) -> None:
        """Who issued these has waited for them at an event, and others know of them by it."""
        for actor in actors:
            self.accesses.event[actor.stored] = event

    # --- flags ---

    def _strong(self, by: Accessor, last: np.ndarray) -> np.ndarray:
        """The writes that are morally strong with an access, 0 for the others."""
        return np.where(by.morally_strong(last), last, 0) if np.count_nonzero(last) else last

    def _hear(
        self, by: Accessor, where: np.ndarray, cells: np.ndarray, size: int, how: Strength
    ) -> None:  # fmt: skip
        """Strong reads of flags."""
        place, each = by.member.place(by.cta.rank), by.member.numbers(by.at[:, 0])
        last = self._strong(by, self._written.take(cells))
        firsts = self._chained.take(cells)
        both = zip(
            scalars(where, size, how.width, last), scalars(where, size, how.width, firsts),
            strict=True,
        )  # fmt: skip
        for (addresses, words), (_, chains) in both:
            assert words is not None
            assert chains is not None
            before = whole(words)
            whose: dict[int, list[int]] = {}
            for i, address in enumerate(addresses.tolist()):
                whose.setdefault(address, []).append(i)
            for address, readers in whose.items():
                write = before[readers[0]]
                first, threads = int(chains[readers[0], 0]), [each[i] for i in readers]
                self.flags.read(address, Threads(threads, place), how, write, first, by.began)

    def _publish(
        self, by: Accessor, where: np.ndarray, last: np.ndarray, cells: np.ndarray, how: Strength,
        own: np.ndarray,
    ) -> None:  # fmt: skip
        """Strong writes of flags; ``last``: what had written the cells before; ``own`` (n,): the
        write of each thread, whoever's is left, or of a work."""
        member, actor, place = by.member, by.actor, by.member.place(by.cta.rank)
        size = self.cell * cells.shape[1]
        part = size > how.width
        written, last = self._written.take(cells), self._strong(by, last)
        if actor is None:
            agents = by.at[:, 0]
            at = Snapshot(member.order, agents, by.began - 1 if part else None)
            each: Sequence[Moment[Message]] = moments(member, at)
            tells = at.have_fences()
        else:
            agents, tells = np.full(len(where), actor.issuer), False
            each = [WorkMoment(member, actor)] * len(where)
        whose = member.numbers(agents)
        words = (last, written, self._chained.take(cells))
        for each_of in zip(*(scalars(where, size, how.width, word) for word in words), strict=True):
            addresses = each_of[0][0]
            before, now, firsts = (found for _, found in each_of)
            assert before is not None
            assert now is not None
            assert firsts is not None
            old, made = np.array(whole(before)), now[:, 0]
            for i, address in enumerate(addresses.tolist()):
                who, write, mine = Who(whose[i], place), int(made[i]), int(own[i % len(own)])
                first = int(firsts[i, 0]) if mine == write else mine
                writes = (first, mine) if part else None
                one = Write(write, who, how, each[i], tells, actor is None, writes)
                self.flags.write(address, int(old[i]), one)

    # --- messages ---

    def _after_writes(
        self, by: Accessor, last: _Earlier, kept: np.ndarray | None = None
    ) -> None:  # fmt: skip
        """Check an access against the last writes, and strong ones before. ``kept``: cells that
        hold the value already."""
        buffer, cells, written, kind = last
        for at, writes in itertools.chain(((cells, written),), self._updates.before(cells)):
            earlier = _Earlier(buffer, at, writes, kind)
            late = by.races_with(writes)
            if self.flags.were_read and np.count_nonzero(late):
                late &= ~self._observed(by, earlier, late)
            if kept is not None:
                late &= ~kept if at is cells else True
            self._tell(by, earlier, late)
            self._tell(by, earlier, by.unfenced(writes) & ~late, True)

    def _observed(self, by: Accessor, earlier: _Earlier, late: np.ndarray) -> np.ndarray:
        """Which of the writes that seem late somebody has observed who comes before an access."""
        found = np.zeros(late.shape, bool)
        buffer, cells, writes, _ = earlier
        codes = self.accesses.code.take(writes)
        if by.actor is not None:
            return found
        for i, j in np.argwhere(late & (codes & SCOPE > 0)).tolist():
            offset = (int(cells[i, j]) - self._starts[buffer.base]) * self.cell
            width = width_of_code(int(codes[i, j]))
            address = (buffer.base - buffer.base % self.cell + offset) // width * width
            (agent,) = by.member.numbers(by.at[i if len(by.at) > 1 else 0])
            found[i, j] = self.flags.observed(address, int(writes[i, j]), agent, by.began)
        return found

    def _follow(
        self, cells: np.ndarray, last: np.ndarray, by: Accessor, how: Strength | None
    ) -> None:  # fmt: skip
        """Cells are written. A weak write comes after all that was done there, but a strong one may
        be no race where one that comes later races with those before."""
        if how is None:
            self._reads.clear(cells)
            self._updates.clear(cells)
        elif np.count_nonzero(last):
            self._updates.add(cells, last, by.unseen, by.code)

    def _tell(
        self, by: Accessor, earlier: _Earlier, late: np.ndarray, fence: bool = False
    ) -> None:  # fmt: skip
        """An access comes too early after those that are ``late``: an alarm for each instruction
        that made some of these, for one may be suppressed. ``fence``: only a fence is missing."""
        if not np.count_nonzero(late):
            return
        sites = np.where(late, self.accesses.site.take(earlier.accesses), -1)
        for site in np.unique(sites[late]).tolist():
            self._tell_one(by, earlier, sites == site, fence)

    def _tell_one(
        self, by: Accessor, earlier: _Earlier, late: np.ndarray, fence: bool
    ) -> None:  # fmt: skip
        buffer, cells, accesses, other = earlier
        at, access = np.argwhere(late)[0], int(accesses[late][0])
        cell = int(cells[late][0]) - self._starts[buffer.base]
        byte = max(cell * self.cell - buffer.base % self.cell, 0)
        who, site = int(self.accesses.who[access]), self.accesses.site_of(access)
        column = int(by.at[at[0] if len(by.at) > 1 else 0, 0])
        here = by.member.order.named(by.site, column)
        there = named(site, who % COLUMNS, *self._naming[who // COLUMNS])
        place = f"byte {byte:#x} of {buffer.name}"
        if fence:
            message = unfenced(here, by.verb, place, other, there)
            by.member.alarms.tell("global", MissingFence(message, by.site.line), by.site, site)
            return
        message = unordered(here, by.verb, place, other, there)
        code = int(self.accesses.code[access])
        if code & SCOPE and by.code & SCOPE:
            if not alike(code, by.code):
                message += ": one is wider than the other, or goes through another proxy"
            else:
                narrow = _NAMES[min(code & SCOPE, by.code & SCOPE)]
                message += f": the scope {narrow} of one does not include the other"
        elif int(self.accesses.event[access]) == NEVER and code & ASYNC:
            message += ": its thread must wait for it by cp.async.bulk.wait_group without .read"
        by.member.alarms.tell("global", DataRace(message, by.site.line), by.site, site)
