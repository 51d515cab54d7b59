"""What was done to each cell of a memory last, and whether the next access is ordered after it.

For each cell (a byte or a word) the shadow keeps its last write and its readers since. An access is
a race if one of those is not known to happen before it; both sides are named.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..alarms.errors import Site, unfenced, unordered
from ..clocks.access import Access, Conflict
from ..clocks.knowledge import Actor
from ..clocks.lane_copies import Copies
from ..clocks.order import Order
from ..clocks.readers import Readers, seen_events
from ..clocks.scalars import of_one_write
from ..clocks.scopes import WEAK, width_of_code
from .strong_accesses import StrongAccesses
from .undefined import Blanks

if TYPE_CHECKING:
    from ..alarms.alarm import Alarms

__all__ = ["Shadow"]


_RACES = ("race", "lanes", "fence")


class Shadow:
    """What was done to ``cells`` cells of one memory.

    Args:
        name: of the memory, for messages, with ``{}`` for the place.
        cells: their number.
        order: the clock of the cluster.
        alarms: of the launch; they know which checks are wanted.
        size: bytes of a cell.
        base: the address of the first one, as flags have it.
    """

    def __init__(
        self, name: str, cells: int, order: Order, alarms: Alarms, size: int = 1, base: int = 0
    ) -> None:  # fmt: skip
        self.name, self.order, self.size, self.alarms = name, order, size, alarms
        self.races = not alarms.checks.isdisjoint(_RACES)
        self.blanks: Blanks | None = None  # where undefined bits are looked for
        if "uninitialized" in alarms.checks:
            self.blanks = self._blanks(cells)
        self.writer = np.zeros(cells, np.uint16)  # the column of who wrote last
        self.written = np.zeros(cells, np.uint32)  # the event of the write, 0: never
        self.given = np.zeros(0, np.int64)  # cells that hold something from the start
        #: Of strong writes: the event of the first of their chain of read-modify-writes.
        self.chained = np.zeros(cells, np.uint32)
        self.readers = Readers(cells if self.races else 0, order)  # weak ones
        self.strong = StrongAccesses(cells, order, size, base)
        self._others: Readers | None = None  # writers of the same value that the last did not know
        order.who.users.append(self._columns)

    def _blanks(self, cells: int) -> Blanks:
        """With a mask for each byte."""
        return Blanks(self, cells * self.size, np.uint8)

    def unwritten(self, cells: np.ndarray) -> np.ndarray:
        """Which of the cells hold nothing that anybody gave them."""
        blank: np.ndarray = self.written[cells] == 0
        return blank & ~np.isin(cells, self.given) if len(self.given) else blank

    def cells_of(self, items: np.ndarray) -> np.ndarray:
        """The cells that hold these bytes."""
        return items // self.size

    def _columns(self) -> list[int]:
        """Columns that a cell names."""
        writers = np.unique(self.writer[self.written > 0])
        others = [] if self._others is None else self._others.columns().tolist()
        kept = self.strong.columns()
        return [*writers.tolist(), *self.readers.columns().tolist(), *kept, *others]

    # --- by threads ---

    def read(self, cells: np.ndarray, agents: np.ndarray, site: Site, code: int = WEAK) -> None:
        """Cells (n, k) are read by agents (n,); for the code see scopes."""
        if not self.races:
            return
        access = Access(cells, agents[:, None], self.order.view(agents), site, "reads", code)
        late = self._unordered(access)
        if late is not None:
            self._after_write(access, late)
        self._tell(access, self._others_unordered(access), "write")
        event = self.order.event(site, code)
        if not _updates(site):  # the write that follows says all
            readers = self.strong.kept(code, False) if code else self.readers
            readers.read(cells, access.at, event, access.view)

    def write(
        self, cells: np.ndarray, agents: np.ndarray, site: Site, code: int = WEAK,
        same: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Cells (n, k) are written by agents (n,); for the code see scopes.

        ``same`` (2, n, k): the cell held the value that is written; it holds it afterwards, all
        threads having written. That is no race.
        """
        at = agents[:, None]
        if not self.races:
            self.writer[cells], self.written[cells] = at, self.order.event(site, code)
            return
        access = Access(cells, at, self.order.view(agents), site, "writes", code)
        self._before_write(access, same)
        self._after_reads(access)
        event = self.order.event(site, code)
        if code and not site.opcode.startswith("mbarrier"):  # whose users ask seen
            event = self._write_strong(access, event)
        self.writer[cells], self.written[cells] = at, event
        if not code:
            self._lost(access, event, same)

    def last(
        self, cells: np.ndarray, agents: np.ndarray, code: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of cells (n, k) that agents access with a code: the events of the last writes, if they
        are morally strong with it, and those of the first ones of their chains."""
        written, writer = self.written.take(cells), self.writer.take(cells)
        strong = self.strong.morally_strong(written, writer, agents[:, None], code)
        return np.where(strong, written, 0), self.chained.take(cells)

    def _write_strong(self, access: Access, event: int) -> int:
        """A strong write at an event; the event of those whose value is left."""
        cells, at, code, site = access.cells, access.at, access.code, access.site
        kept = self.strong.kept(code, True)
        kept.read(cells, at, event, access.view)
        written, writer = self.written.take(cells), self.writer.take(cells)
        self.writer[cells] = at
        left = np.all(self.writer.take(cells) == at, axis=1)
        if not left.all():  # of several lanes nobody reads some
            event, (tables, which) = self.order.event(site, code), access.view
            kept.read(
                cells[left], at[left], event, (tables, None if which is None else which[left])
            )
        chains = np.zeros(cells.shape, bool)
        if _updates(site):
            strong = (written > 0) & self.strong.morally_strong(written, writer, at, code)
            each = max(width_of_code(code) // self.size, 1)
            chains = of_one_write(np.where(strong, written, 0), each) > 0
        self.chained[cells] = np.where(chains, self.chained.take(cells), event)
        return event

    def _before_write(self, access: Access, same: np.ndarray | None) -> None:
        """Check a write against those before, and keep those that it does not stand for."""
        cells, code = access.cells, access.code
        late = self._unordered(access)
        changes = None if same is None else ~same[0]
        kept = None
        if late is not None:
            if changes is not None:
                kept, late = late & ~changes, late & changes
            if np.count_nonzero(late):
                self._after_write(access, late)
        if changes is None or np.count_nonzero(changes):
            self._tell(access, self._others_unordered(access, changes), "write")
            if self._others is not None and not code:
                self._others.clear(cells if changes is None else cells[changes])
        if kept is not None and np.count_nonzero(kept):
            self._others = self._others or Readers(len(self.writer), self.order)
            self._keep(cells[kept], self._others)
        if code:
            written = self.written.take(cells)
            weak = (written > 0) & (self.order.codes(written) == WEAK)
            if np.count_nonzero(weak):
                self._keep(cells[weak], self.strong.kept(WEAK, True))

    def _keep(self, cells: np.ndarray, others: Readers) -> None:
        """The last writers of cells (n,) count besides those who write now."""
        pairs = self.written[cells].astype(np.int64) << 16 | self.writer[cells]
        nothing = np.zeros((1, self.order.columns), np.uint32), None
        for pair in np.unique(pairs).tolist():
            others.read(np.unique(cells[pairs == pair]), pair & 0xFFFF, pair >> 16, nothing)

    def _lost(self, access: Access, event: int, same: np.ndarray | None) -> None:
        """Several threads of one instruction have written a cell: a race, or all the same."""
        lost = self.writer.take(access.cells) != access.at
        if not np.count_nonzero(lost):
            return
        if same is not None:
            if np.count_nonzero(lost & same[1]):
                others = self._others = self._others or Readers(len(self.writer), self.order)
                others.read(access.cells, access.at, event, access.view)
            lost &= ~same[1]
        if np.count_nonzero(lost):
            self._after_write(access, lost)

    def _others_unordered(
        self, access: Access, chosen: np.ndarray | None = None
    ) -> list[Conflict]:  # fmt: skip
        """Writes besides the last, of the cells that are ``chosen``, that an access is not ordered
        after."""
        found = self.strong.unseen(access, True, chosen)
        if self._others is not None:
            races = partial(self.strong.races, code=access.code)
            found += self._others.unseen(access, races, chosen)
        return found

    def _unordered(self, access: Access) -> np.ndarray | None:
        """Which cells somebody else wrote, unseen, so that an access races with it; None: none of
        them."""
        cells, at = access.cells, access.at
        writer, written = self.writer.take(cells), self.written.take(cells)
        late = written > seen_events(access.view, writer)
        if not np.count_nonzero(late):
            return None
        late &= (writer != at) | (written < access.since)
        if np.count_nonzero(late):
            who, code = np.broadcast_to(at, cells.shape)[late], access.code
            late[late] = self.strong.races(written[late], writer[late], cells[late], who, code)
        return late if np.count_nonzero(late) else None

    # --- by asynchronous work ---

    def read_by(self, cells: np.ndarray, actor: Actor, site: Site) -> None:
        """Cells, of any shape, are read."""
        cells = cells.reshape(-1)
        access = self._ordered(cells, actor, "reads", site) if self.races else None
        event = self.order.event(site, actor.code)
        actor.did(event)
        if access is not None and not actor.code:
            self.readers.read(cells, actor.column, event, access.view)

    def write_by(self, cells: np.ndarray, actor: Actor, site: Site) -> None:
        """Cells, of any shape, are written."""
        cells = cells.reshape(-1)
        if self.races:
            self._after_reads(self._ordered(cells, actor, "writes", site))
            if self._others is not None:
                self._others.clear(cells)
        event = self.order.event(site, actor.code)
        actor.did(event)
        self.writer[cells], self.written[cells] = actor.column, event

    def write_copies(
        self, cells: np.ndarray, copies: Copies, site: Site, same: np.ndarray | None
    ) -> None:  # fmt: skip
        """Cells (n, k) are written by the cp.async of n lanes; ``same`` as for ``write``."""
        at, event = copies.columns[:, None], copies.event
        if not self.races:
            self.writer[cells], self.written[cells] = at, event
            return
        access = Access(cells, at, copies.view(), site, "writes", work=copies)
        self._before_write(access, same)
        self._after_reads(access)
        self.writer[cells], self.written[cells] = at, event
        self._lost(access, event, same)

    def _ordered(self, cells: np.ndarray, actor: Actor, verb: str, site: Site) -> Access:
        """An access by a work, checked against the writes before."""
        seen, through_proxy = self._view_of(actor)
        view = seen[None], None
        access = Access(cells, actor.column, view, site, verb, actor.code, actor)
        fenced = access.seeing(through_proxy)
        late = self._unordered(fenced)
        if late is not None:
            racing = self._unordered(access)
            if racing is not None:
                self._after_write(access, racing)
                late &= ~racing
            self._after_write(access, late, "fence")
            return access
        for each, lacks in ((access, "race"), (fenced, "fence")):
            others = self._others_unordered(each)
            if others:
                self._tell(access, others, "write", lacks)
                return access
        tensor = self.order.tensor_view(actor)
        if tensor is not None:
            late = self._unordered(access.seeing(tensor))
            if late is not None:
                self._after_write(access, late, "tcgen05_order")
        return access

    def _view_of(self, actor: Actor) -> tuple[np.ndarray, np.ndarray]:
        """What a work has seen, and what of that through its own proxy; Tensor Memory has its own
        answer."""
        return self.order.view_of(actor)

    # --- both ---

    def _after_reads(self, access: Access) -> None:
        """Check a write against the reads before; a weak one stands for them then."""
        work, lacks = access.work, "race"
        found = self.readers.unseen(access)
        found += self.strong.unseen(access, False)
        if not found and isinstance(work, Actor):
            tensor = self.order.tensor_view(work)
            if tensor is not None:
                found, lacks = self.readers.unseen(access.seeing(tensor)), "tcgen05_order"
            if not found and "proxy_reads" in self.alarms.checks:
                found = self.readers.unseen(access.seeing(self._view_of(work)[1]))
                lacks = "proxy_reads"
        self._tell(access, found, "read", lacks)
        if not access.code:
            self.strong.clear(access.cells)
            self.readers.clear(access.cells)

    def _after_write(self, access: Access, late: np.ndarray, lacks: str = "race") -> None:
        """Complain of an access to the cells that are ``late``: of each instruction by which they
        were written, for one may be suppressed."""
        written_to = access.cells[late]
        sites: dict[Site, int] = {}
        for i in np.sort(np.unique(self.written[written_to], return_index=True)[1]).tolist():
            sites.setdefault(self.order.site(int(self.written[written_to[i]])), i)
        by = np.broadcast_to(access.at, access.cells.shape)[late]
        for i in sites.values():
            cell = int(written_to[i])
            column, event = int(self.writer[cell]), int(self.written[cell])
            self.race(access, Conflict(cell, int(by[i]), column, event), "write", lacks)

    def seen(self, cell: int, agents: np.ndarray) -> np.ndarray:
        """Which of the agents (n,) have seen the last write to a cell, one that was made."""
        written, writer = int(self.written[cell]), int(self.writer[cell])
        if not written:
            return np.zeros(len(agents), bool)
        tables, which = self.order.view(agents)
        ordered = tables[:, min(writer, tables.shape[1] - 1)] >= written
        return np.asarray((ordered if which is None else ordered[which]) | (agents == writer))

    # --- messages ---

    def cell_name(self, cell: int) -> str:
        return f"{cell * self.size:#x}"

    def _tell(
        self, access: Access, found: list[Conflict], other: str, lacks: str = "race"
    ) -> None:  # fmt: skip
        for conflict in found:
            self.race(access, conflict, other, lacks)

    def race(
        self, access: Access, conflict: Conflict, other: str, lacks: str = "race"
    ) -> None:  # fmt: skip
        """An alarm: an access conflicts with an earlier one, and nothing orders them.

        Args:
            other: what the earlier one was: a "read", a "write", or a "use" of an mbarrier.
            lacks: the kind of the alarm; it is lanes where nothing orders those of a warp.
        """
        order = self.order
        column, event, verb = conflict.column, conflict.event, access.verb
        place, earlier = self.name.format(self.cell_name(conflict.cell)), order.site(event)
        who = access.who(conflict.by)
        agent, own = (who.issuer, who.column) if isinstance(who, Actor) else (who, who)
        here, there = order.named(access.site, own), order.named(earlier, column)
        kind = lacks
        if lacks == "tcgen05_order":
            assert isinstance(who, Actor)
            which = "after" if order.was_passed(who, column, event) else "before"
            message = (
                f"missing tcgen05.fence::{which}_thread_sync: {here} {verb} {place} after the "
                f"{other} by {there}: ::before_thread_sync goes before the release, "
                "::after_thread_sync after the acquire"
            )
        elif lacks in ("fence", "proxy_reads"):
            if earlier.opcode.startswith("mbarrier.inval"):
                kind = "mbarrier_proxy"  # the ISA does not say that it writes
            if column in order.who.of_lanes[order.who.of_lanes > 0]:
                kind = "cp_async_proxy"
            message = unfenced(here, verb, place, other, there)
        elif column != agent and order.of_one_warp(agent, column, event):
            kind = "lanes"
            message = (
                f"data race between lanes of a warp: {here} {verb} {place}; nothing orders it "
                f"after the {other} by {there}: bar.warp.sync must come between"
            )
        else:
            message = unordered(here, verb, place, other, there)
            if earlier.opcode.startswith("mbarrier.init"):
                message += ": before a relaxed arrival, fence.mbarrier_init must come between"
        self.alarms.tell(kind, message, access.site, earlier)


def _updates(site: Site) -> bool:
    """Whether threads read, modify and write there."""
    return site.opcode.startswith(("atom", "red"))
