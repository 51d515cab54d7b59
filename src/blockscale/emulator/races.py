"""The check "global": accesses to global memory that nothing orders, in launches that run together.

Within a cluster the order of things is that of its vector clocks. Between clusters knowledge passes
through places in global memory (PTX ISA 8.8): a release pattern publishes what its thread knows
with the version of the place that it writes, and an acquire pattern that reads this version learns
it. A scope must include the other thread, else the pattern orders nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .accesses import ASYNC, COLUMNS, NEVER, STRENGTH, Accesses
from .checks import DataRace, MissingFence, Site
from .engine import Work
from .knowledge import FENCED, SEEN
from .messages import Learned, Message, together
from .order import named
from .past_reads import PastReads
from .readers import View, seen_events
from .scopes import CLUSTER, CTA, GPU, SYS, Strength, needed

if TYPE_CHECKING:
    from . import machine
    from .cluster import Cluster
    from .knowledge import Actor
    from .memory import Buffer, GlobalMemory

__all__ = ["Member", "Races"]

_NAMES = {1: ".cta", 2: ".cluster", 3: ".gpu", 4: ".sys"}
_CTAS = 16  # of a cluster, at most

#: The numbers of a CTA, its cluster and its device.
Place = tuple[int, int, int]
#: What was released, by scope and the number of the CTA, cluster or device that did it. A CTA has
#: all that it released itself, and a cluster, too; a device what was released to its scope or SYS.
Released = dict[tuple[int, int], Message]


@dataclass(slots=True, eq=False)
class _Version:
    """What was released with the value that a place holds."""

    access: int  # that wrote it
    released: Released
    taken: dict[tuple[int, Place], Message] = field(default_factory=dict)

    def to(self, reach: int, place: Place) -> Message:
        """What an acquire of a scope learns in a CTA."""
        if (reach, place) not in self.taken:
            self.taken[reach, place] = _included(self.released, reach, place)
        return self.taken[reach, place]


def _included(released: Released, reach: int, place: Place) -> Message:
    """What of it is released to that place, and by whom the scope of an acquire includes."""
    found = []
    for (scope, origin), message in released.items():
        if scope >= GPU:
            included = min(scope, reach) >= (GPU if origin == place[2] else SYS)
        else:
            included = scope <= reach and origin == place[scope - CTA]
        if included:
            found.append(message)
    return together(found)


def _add(released: Released, more: Released) -> None:
    for key, message in more.items():
        before = released.get(key)
        released[key] = message if before is None else together((before, message))


def _released(message: Message, reach: int, place: Place) -> Released:
    """A message released to a scope, from a CTA."""
    found = {(scope, place[scope - CTA]): message for scope in (CTA, CLUSTER) if scope <= reach}
    if reach >= GPU:
        found[reach, place[2]] = message
    return found


class Member:
    """A cluster among those that run together."""

    def __init__(self, races: Races, number: int, cluster: Cluster) -> None:
        assert cluster.order is not None
        self.races, self.number, self.order = races, number, cluster.order
        self.device, self.alarms = cluster.launch.device, cluster.launch.alarms
        self.learned = Learned(self.order)
        #: Versions that relaxed accesses read, by place and readers.
        self.pending: dict[tuple[int, bytes], tuple[np.ndarray, _Version]] = {}
        self._fences: dict[tuple[int, int], tuple[int, Message]] = {}

    def place(self, cta: machine.CTA) -> Place:
        return self.number * _CTAS + cta.rank, self.number, self.device

    # --- what passes on ---

    def message(self, rows: np.ndarray) -> Message:
        """What someone passes on who has these rows of knowledge."""
        return {**self.learned.known(rows), self.number: rows}

    def at_fence(self, agent: int, scope: int, at: int) -> Message:
        """What an agent passes on as of its last fence of a scope, at that event."""
        kept = self._fences.get((agent, scope))
        if kept is None or kept[0] != at:
            message = self.message(self.order.passed(agent, scope - CTA))
            kept = self._fences[agent, scope] = at, message
        return kept[1]

    def acquire(self, agents: np.ndarray, message: Message, site: Site) -> None:
        """Agents learn what a message says, at a new event."""
        lacking = self.learned.lacking(agents, message) if message else agents[:0]
        if not len(lacking):
            return
        event = self.order.event(site)
        own = message.get(self.number)
        if own is not None:
            self.order.learn(lacking, own)
        self.learned.add(lacking, event, message)

    def fence(
        self, w: machine.Fragment, reach: int, releases: bool, acquires: bool, sc: bool
    ) -> None:
        """A fence of memory: acquires what relaxed accesses before it read, and releases to those
        after it."""
        agents, place = w.agents(), self.place(w.cta)
        if acquires:
            for key, (readers, version) in list(self.pending.items()):
                here = np.isin(readers, agents)
                if here.any():
                    self.acquire(readers[here], version.to(reach, place), w.site())
                    if here.all() and reach == SYS:
                        del self.pending[key]
        if sc:
            fences = self.races.fences
            self.acquire(agents, _included(fences, reach, place), w.site())
            passed = self.message(self.order.release(agents)[: FENCED + 1])
            _add(fences, _released(passed, reach, place))
        self.order.fence(agents, reach if releases else CTA)


class _Accessor:
    """Who accesses global memory now, and what is known to it.

    Attributes:
        at: columns, as what is known: (n, 1), or (1, 1) of a work.
        view: of its own cluster.
        messages, whose: of others.
        through: the same for what was written by threads, if it works in another proxy.
    """

    def __init__(self, by: Any, how: Strength | None) -> None:
        cta: machine.CTA = by.issuer[0] if isinstance(by, Work) else by.cta
        member = cta.cluster.member
        assert member is not None
        self.member, self.cta, self.site = member, cta, by.site()
        self.races, order = member.races, member.order
        self.place = member.place(cta)
        self.reach = how.reach if how else 0
        self.actor = by.actor if isinstance(by, Work) else None
        self.proxy = self.actor is not None and not self.actor.generic
        self.through: tuple[View, list[Message]] | None = None
        self.whose: np.ndarray | None = None
        if self.actor is not None:
            rows = order.passed_by(self.actor)
            self.at = np.array([[self.actor.column]])
            self.view: View = rows[SEEN : SEEN + 1], None
            self.messages = [member.learned.known(rows)]
            if self.proxy:
                self.through = (rows[FENCED : FENCED + 1], None), self.messages
        else:
            agents = by.agents()
            self.at = agents[:, None]
            self.view = order.view(agents)
            self.messages, self.whose = member.learned.view(agents)

    def part(self, chosen: Any) -> _Accessor:
        """Some of its threads."""
        if self.actor is not None or isinstance(chosen, slice):
            return self
        part = object.__new__(_Accessor)
        part.__dict__.update(self.__dict__)
        part.at = self.at[chosen]
        tables, which = self.view
        part.view = tables, None if which is None else which[chosen]
        part.whose = None if self.whose is None else self.whose[chosen]
        return part

    def _known(self, who: np.ndarray, view: View, row: int) -> np.ndarray:
        """The last event of each of ``who`` that it has seen."""
        cluster, column = who >> 16, who & (COLUMNS - 1)
        known = np.array(np.broadcast_to(seen_events(view, column), who.shape))
        foreign = cluster != self.member.number
        if self.actor is None:
            known[(column == self.at) & ~foreign] = NEVER - 1
        if not np.count_nonzero(foreign):
            return known
        known[foreign] = 0
        for i, message in enumerate(self.messages):
            mine = foreign if self.whose is None else foreign & (self.whose == i)[:, None]
            for number in np.unique(cluster[mine]).tolist():
                rows = message.get(number)
                if rows is not None:
                    here = mine & (cluster == number)
                    columns = column[here]
                    seen = rows[row].take(columns, mode="clip")
                    known[here] = np.where(columns < rows.shape[1], seen, 0)
        return known

    def unseen(self, accesses: np.ndarray) -> np.ndarray:
        """Which of them, of any shape with its threads first, nothing orders before it."""
        made = self.races.accesses
        known = self._known(made.who.take(accesses), self.view, SEEN)
        return np.asarray(made.event.take(accesses) > known)

    def races_with(self, accesses: np.ndarray) -> np.ndarray:
        """Which of them, that are not morally strong with it either."""
        late = self.unseen(accesses)
        if self.reach and np.count_nonzero(late):
            made = self.races.accesses
            reach = made.how.take(accesses) & STRENGTH
            late &= ~self._mutual(made.who.take(accesses), reach)
        return late

    def unfenced(self, accesses: np.ndarray) -> np.ndarray:
        """Which of them a proxy fence is missing after."""
        made = self.races.accesses
        if self.through is None:
            return np.zeros(accesses.shape, bool)
        who = made.who.take(accesses)
        late = made.event.take(accesses) > self._known(who, self.through[0], FENCED)
        return late & (made.how.take(accesses) & ASYNC == 0)

    def _mutual(self, who: np.ndarray, reach: np.ndarray) -> np.ndarray:
        """Of strong accesses: whether the scope of each includes the other's thread."""
        cluster, column = who >> 16, who & (COLUMNS - 1)
        of_cta = self.member.order.warps * self.member.order.lanes
        least = needed(
            column // of_cta == self.cta.rank, cluster == self.member.number,
            self.races.devices(cluster) == self.member.device,
        )  # fmt: skip
        return np.asarray(np.minimum(reach, self.reach) >= least)


class Races:
    """What was done to global memory by launches that run together.

    Args:
        memory: theirs.
        cell: bytes that are told apart.
    """

    def __init__(self, memory: GlobalMemory, cell: int) -> None:
        self.memory, self.cell = memory, cell
        self.accesses = Accesses()
        self.fences: Released = {}  # by fence.sc
        self._naming: list[tuple[int, int, int]] = []  # of each cluster: see named
        self._devices = np.zeros(16, np.uint32)
        self._versions: dict[int, _Version] = {}  # by address
        self._starts: dict[int, int] = {}  # the first cell of each buffer, by its address
        self._made = False

    def _make(self) -> None:
        """Cells for all buffers, once they are there; pages that nobody touches cost nothing."""
        count = 0
        for buffer in self.memory:
            self._starts[buffer.base] = count
            count += len(buffer.data) // self.cell + 2
        self._written = np.zeros(count, np.uint32)
        self._reads = PastReads(count, self.accesses)
        self._made = True

    def enter(self, cluster: Cluster) -> Member:
        """A cluster starts."""
        number, order = len(self._naming), cluster.order
        assert order is not None
        self._naming.append((order.agents, order.warps * order.lanes, order.lanes))
        if number == len(self._devices):
            self._devices = np.concatenate([self._devices, np.zeros_like(self._devices)])
        self._devices[number] = cluster.launch.device
        return Member(self, number, cluster)

    def devices(self, clusters: np.ndarray) -> np.ndarray:
        return np.asarray(self._devices.take(clusters))

    # --- accesses ---

    def _parts(
        self, by: _Accessor, where: np.ndarray, size: int
    ) -> list[tuple[Buffer, Any, np.ndarray]]:
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

    def _add(self, by: _Accessor, n: int, writes: bool) -> np.ndarray:
        """Numbers of the accesses (n, 1) that are made now, of each thread or of one work."""
        event, columns, actor = by.member.order.event(by.site), by.at[:, 0], by.actor
        if actor is not None and writes:  # only its issuer learns of it, once it waits
            columns, event = np.array([actor.issuer]), NEVER
        elif actor is not None:
            actor.did(event)
        who = columns.astype(np.uint32) + np.uint32(by.member.number * COLUMNS)
        made = self.accesses.add(who, event, by.site, by.reach | by.proxy * ASYNC)
        if actor is not None and writes:
            actor.stored += made.tolist()
        return np.broadcast_to(made[:, None], (n, 1))

    def read(self, by: Any, where: np.ndarray, size: int, how: Strength | None) -> None:
        """(n,) pieces are read by a fragment or a work."""
        who = _Accessor(by, how)
        for buffer, chosen, cells in self._parts(who, where, size):
            part = who.part(chosen)
            last = self._written.take(cells)
            if np.count_nonzero(last):
                self._after_write(buffer, cells, part, "reads", last)
            if how is None or not how.updates:
                made = np.broadcast_to(self._add(part, len(cells), False), cells.shape)
                self._reads.read(cells, made, part.unseen)
            if how is not None and how.returns and self._versions:
                self._hear(part, where[chosen], cells[:, 0], how)

    def write(
        self, by: Any, where: np.ndarray, size: int, how: Strength | None,
        same: np.ndarray,
    ) -> None:  # fmt: skip
        """(n,) pieces were written. ``same`` (2, n, size): the byte held the value before, and it
        holds it now that all threads have written."""
        who = _Accessor(by, how)
        for buffer, chosen, cells in self._parts(who, where, size):
            part = who.part(chosen)
            kept = np.all(same[:, chosen].reshape(2, *cells.shape, -1), axis=-1)
            last = self._written.take(cells)
            if np.count_nonzero(last):
                self._after_write(buffer, cells, part, "writes", last, kept[0])
            for reads in self._reads.before(cells):
                if self._after_read(buffer, cells, part, reads):
                    break
            self._reads.clear(cells)
            made = self._add(part, len(cells), True)
            self._written[cells] = made
            if how is None and who.actor is None:
                lost = self._written.take(cells) != made
                lost &= ~kept[1]
                if np.count_nonzero(lost):
                    self._tell(buffer, cells, part, lost, "writes", "write", self._written[cells])
            elif how is not None:
                self._publish(part, where[chosen], last[:, 0], made[:, 0], how)

    def waited(self, actors: Iterable[Actor], event: int) -> None:
        """Who issued these has waited for them at an event, and others know of them by it."""
        for actor in actors:
            self.accesses.event[actor.stored] = event

    # --- flags ---

    def _hear(self, by: _Accessor, where: np.ndarray, cells: np.ndarray, how: Strength) -> None:
        """Strong reads of places: what was released with what they hold."""
        for address in np.unique(where).tolist():
            version = self._versions.get(address)
            if version is None or not version.released:
                continue
            here = where == address
            access = self._written[cells[here][:1]]
            if int(access[0]) != version.access or not self._strong(by, access):
                continue
            agents = by.at[here, 0]
            if how.acquires:
                by.member.acquire(agents, version.to(how.reach, by.place), by.site)
            else:
                by.member.pending[address, agents.tobytes()] = agents, version

    def _strong(self, by: _Accessor, access: np.ndarray) -> bool:
        """Whether a strong accessor and a write are morally strong."""
        how = self.accesses.how[access] & STRENGTH
        return bool(how[0]) and bool(by._mutual(self.accesses.who[access], how)[0])

    def _publish(
        self, by: _Accessor, where: np.ndarray, before: np.ndarray, made: np.ndarray, how: Strength
    ) -> None:
        """Strong writes of places: what is released with what they hold now."""
        for i, address in enumerate(where.tolist()):
            version, old = self._versions.get(address), before[i : i + 1]
            released: Released = {}
            if version is not None and version.access == int(old[0]):
                own = self.accesses.who[old[0]] == self.accesses.who[made[i]]
                if own or (how.updates and self._strong(by, old)):
                    here = self.accesses.who[old[0]] // COLUMNS == by.member.number
                    released = {
                        key: message
                        for key, message in version.released.items()
                        if here or key[0] >= GPU  # else no acquire could include both writers
                    }
            for scope, message in self._passes(by, i, how):
                _add(released, _released(message, scope, by.place))
            if released:
                self._versions[address] = _Version(int(made[i]), released)
            else:
                self._versions.pop(address, None)

    def _passes(self, by: _Accessor, i: int, how: Strength) -> Iterator[tuple[int, Message]]:
        """What thread ``i`` of a strong write passes on, and to which scopes."""
        member, order = by.member, by.member.order
        if how.releases:
            actor = by.actor
            rows = order.passed(int(by.at[i, 0])) if actor is None else order.passed_by(actor)
            yield how.reach, member.message(rows)
        elif by.actor is None:
            agent, last = int(by.at[i, 0]), 0
            for scope in range(how.reach, CTA - 1, -1):
                at = order.fenced_at(agent, scope - CTA)
                if at > last:
                    last = at
                    yield scope, member.at_fence(agent, scope, at)

    # --- messages ---

    def _after_write(
        self, buffer: Buffer, cells: np.ndarray, by: _Accessor, verb: str, last: np.ndarray,
        kept: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        late = by.races_with(last)
        if kept is not None:
            late &= ~kept
        if np.count_nonzero(late):
            self._tell(buffer, cells, by, late, verb, "write", last)
            return
        late = by.unfenced(last)
        if np.count_nonzero(late):
            self._tell(buffer, cells, by, late, verb, "write", last, fence=True)

    def _after_read(
        self, buffer: Buffer, cells: np.ndarray, by: _Accessor, reads: np.ndarray
    ) -> bool:  # fmt: skip
        late = by.races_with(reads)
        if not np.count_nonzero(late):
            return False
        self._tell(buffer, cells, by, late, "writes", "read", reads)
        return True

    def _tell(
        self, buffer: Buffer, cells: np.ndarray, by: _Accessor, late: np.ndarray, verb: str,
        other: str, accesses: np.ndarray, fence: bool = False,
    ) -> None:  # fmt: skip
        """``by`` accesses cells; those that are ``late`` were accessed before."""
        at, access = np.argwhere(late)[0], int(accesses[late][0])
        cell = int(cells[late][0]) - self._starts[buffer.base]
        byte = max(cell * self.cell - buffer.base % self.cell, 0)
        who, earlier = int(self.accesses.who[access]), self.accesses.place(access)
        column = int(by.at[at[0] if len(by.at) > 1 else 0, 0])
        here = by.member.order.named(by.site, column)
        there = named(earlier, who % COLUMNS, *self._naming[who // COLUMNS])
        place = f"byte {byte:#x} of {buffer.name}"
        if fence:
            message = (
                f"missing fence.proxy.async: {here} {verb} {place} through the asynchronous proxy "
                f"after the ordinary {other} by {there}"
            )
            by.member.alarms.tell("global", MissingFence(message, by.site.line), by.site, earlier)
            return
        message = (
            f"data race: {here} {verb} {place}; nothing orders it after the {other} by {there}"
        )
        how = int(self.accesses.how[access])
        if how & STRENGTH and by.reach:
            narrow = _NAMES[min(how & STRENGTH, by.reach)]
            message += f": the scope {narrow} of one does not include the other"
        elif int(self.accesses.event[access]) == NEVER and how & ASYNC:
            message += ": its thread must wait for it by cp.async.bulk.wait_group without .read"
        by.member.alarms.tell("global", DataRace(message, by.site.line), by.site, earlier)
