"""Who happens before whom: vector clocks over the threads of a cluster and its asynchronous work.

There is one clock for the whole cluster: it counts accesses, and each access is an *event* with a
number. Whoever accesses has a *column*: each agent one, which is a thread (or a warp, where its
lanes are not told apart), each tensor-core pipe one, for its work is in order, and each copy one as
long as it matters, for copies are not. What they know is tables over the columns: see
``knowledge``. Agents that learned the same share one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace

import numpy as np

from .checks import Site
from .flags import Flags
from .knowledge import (
    FENCED,
    INITS,
    PASSED,
    RUN,
    SEEN,
    TENSOR,
    Actor,
    Knowledge,
    Pipe,
    executed,
    joined,
)
from .program import PtxError
from .scopes import CLUSTER

__all__ = ["MOST_COLUMNS", "Order", "named"]

MOST_COLUMNS = 0xFFFF
_COPIES = 64  # columns of copies at the start: there are as many as it takes
_TABLES = 4096  # kept before those that nobody has are dropped
_VIEWS = 64


class Order:
    """The clock of a cluster, and what everybody knows.

    Args:
        ctas: CTAs of the cluster.
        warps: warps of each.
        lanes: lanes of a warp that are told apart: 32, or 1, which makes a warp one agent.
        programmatic: whether the kernel before has a column, too.
        tensor: whether there are the rows of tcgen05.fence.
        scopes: fences that are told apart: those that reach a CTA, the cluster, and more.
        runs: whether somebody may ask what was executed: see Flags.
    """

    def __init__(
        self, ctas: int, warps: int, lanes: int = 32, programmatic: bool = False,
        tensor: bool = False, scopes: int = CLUSTER, runs: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.warps, self.lanes, self.tensor = warps, lanes, tensor
        self._rows = 1 + (TENSOR if tensor else RUN)
        agents = ctas * warps * lanes
        pipes = ctas * (-(-warps // 4) + warps)
        self.agents = agents
        self.predecessor = agents + pipes if programmatic else None
        self._first_copy = agents + pipes + programmatic
        self.columns = self._first_copy + _COPIES
        #: Writers whose accesses the asynchronous proxy sees only after a proxy fence.
        self.is_generic = np.arange(self.columns) < agents
        self._free = list(range(self.columns - 1, self._first_copy - 1, -1))
        self._next_pipe = agents
        self._pipes: dict[Hashable, Pipe] = {}
        self._told: dict[Hashable, int] = {}  # columns of copies that tell mbarriers
        self._column_of = np.zeros(agents, np.int32)  # of the cp.async of each agent
        self.now = 1  # the last event; the kernel before is event 1
        self._sites: list[Site] = []
        self._numbers: dict[tuple[Site, bool], int] = {}
        self._site_of = array("I", [0, 0])  # of each event
        self._strong, self._loads, self._stores = np.zeros((3, 256), bool)  # by number of the site
        # What each agent knows: a table, and its own last event before a fence of each kind.
        self._tables: list[Knowledge] = [np.zeros((self._rows, self.columns), np.uint32)]
        self._places = {id(self._tables[0]): 0}
        self._limit = _TABLES
        self._table_of = np.zeros(agents, np.int32)
        self._table_at_fence = np.zeros((scopes, agents), np.int32)
        self._own_fenced = np.zeros(agents, np.uint32)
        self._own_inits = np.zeros(agents, np.uint32)
        self._own_at_fence = np.zeros((scopes, agents), np.uint32)
        #: What relaxed waits heard of, which an acquire fence makes known.
        self._heard = np.full(agents, None, object)
        self.version = 0  # of what agents know
        self._views: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray | None]] = {}
        self._viewed = 0
        self.flags = Flags(self, runs)
        #: Each says which columns it still needs; see ``_reclaim``.
        self.users: list[Callable[[], Iterable[int]]] = []

    # --- events ---

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

    def are_reads(self, events: np.ndarray) -> np.ndarray:
        """Whether these events, of any shape, are of instructions that read."""
        return np.asarray(~self._stores[np.frombuffer(self._site_of, np.uint32)[events]])

    def are_writes(self, events: np.ndarray) -> np.ndarray:
        """The same of those that write."""
        return np.asarray(~self._loads[np.frombuffer(self._site_of, np.uint32)[events]])

    def are_strong(self, events: np.ndarray) -> np.ndarray:
        """Whether these events, of any shape, are strong accesses."""
        sites = np.frombuffer(self._site_of, np.uint32)[events]
        return np.asarray(self._strong[sites])

    # --- what agents know ---

    def _fit(self, known: Knowledge) -> Knowledge:
        """With a column for everybody there is now."""
        lacking = self.columns - known.shape[1]
        return np.pad(known, ((0, 0), (0, lacking))) if lacking else known

    def join(self, messages: Iterable[Knowledge]) -> Knowledge:
        joined = np.zeros((self._rows, self.columns), np.uint32)
        for message in messages:
            part = joined[:, : message.shape[1]]
            np.maximum(part, message, out=part)
        return joined

    def _together(self, tables: np.ndarray) -> Knowledge:
        """What all who have these tables know, an array of its own."""
        first, *others = self._distinct(tables)
        known = np.zeros((self._rows, self.columns), np.uint32)
        known[:, : self._tables[first].shape[1]] = self._tables[first]
        for other in others:
            part = known[:, : self._tables[other].shape[1]]
            np.maximum(part, self._tables[other], out=part)
        return known

    def _place(self, table: Knowledge) -> int:
        """The number of a table."""
        place = self._places.get(id(table))
        if place is None:
            place = self._places[id(table)] = len(self._tables)
            self._tables.append(table)
        return place

    def _forget(self) -> None:
        """Drop the tables that nobody has."""
        both = np.concatenate([self._table_of[None], self._table_at_fence])
        used, at = np.unique(both, return_inverse=True)
        self._tables = [self._tables[i] for i in used.tolist()]
        self._places = {id(table): i for i, table in enumerate(self._tables)}
        numbers = at.astype(np.int32).reshape(both.shape)
        self._table_of, self._table_at_fence = numbers[0], numbers[1:]
        self._limit = max(_TABLES, 2 * len(used))

    def _distinct(self, tables: np.ndarray) -> list[int]:
        first = int(tables[0])
        if len(tables) == 1 or not np.count_nonzero(tables != first):
            return [first]
        return np.unique(tables).tolist()

    def view(self, agents: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """What agents have seen: (tables, columns), and whose is which, None if there is one."""
        if self._viewed != self.version:
            self._views.clear()
            self._viewed = self.version
        found = self._views.get(id(agents))
        if found is not None:
            return found[1], found[2]
        tables = self._table_of[agents]
        used = self._distinct(tables)
        seen, which = self._fit(self._tables[used[0]])[:1], None
        if len(used) > 1:
            seen = np.stack([self._fit(self._tables[i])[SEEN] for i in used])
            which = np.searchsorted(used, tables)
        if len(self._views) >= _VIEWS:
            self._views.clear()
        self._views[id(agents)] = agents, seen, which
        return seen, which

    def release(self, agents: np.ndarray, relaxed: bool = False) -> Knowledge:
        """What these agents pass on to who acquires it; relaxed: of memory only what a fence
        precedes."""
        tables = self._table_at_fence[0] if relaxed else self._table_of
        message = self._together(tables[agents])
        message[SEEN, agents] = self._own_at_fence[0, agents] if relaxed else self.now
        fenced = np.maximum(message[FENCED, agents], self._own_fenced[agents])  # by others, too
        message[FENCED, agents] = fenced
        message[INITS, agents] = self._own_inits[agents]
        message[RUN, agents] = self.now
        if self.tensor:
            message[PASSED, agents] = message[SEEN, agents]
            message[TENSOR] = 0
        return joined(message, executed(self.release(agents))) if relaxed else message

    def acquire(self, agents: np.ndarray, message: Knowledge) -> None:
        message = self._fit(message)

        def learn(known: Knowledge) -> Knowledge:
            known = self._fit(known)
            return message if (known <= message).all() else np.maximum(known, message)

        self._replace(agents, learn)

    def _replace(self, agents: np.ndarray, change: Callable[[Knowledge], Knowledge]) -> None:
        """Give these agents other tables for theirs."""
        if len(self._tables) >= self._limit:
            self._forget()  # which numbers them anew
        tables = self._table_of[agents]
        changed = {old: self._place(change(self._tables[old])) for old in self._distinct(tables)}
        if len(changed) == 1:
            self._table_of[agents] = changed[int(tables[0])]
        else:
            self._table_of[agents] = [changed[old] for old in tables.tolist()]
        self.version += 1

    def fence_proxy(self, agents: np.ndarray) -> None:
        """What was seen, the asynchronous proxy may rely on."""
        self._copy_row(agents, SEEN, FENCED)
        self._own_fenced[agents] = self.now

    def hear(self, agents: np.ndarray, message: Knowledge) -> None:
        """A relaxed wait: its end is known, and only a fence acquires the rest (8.8)."""
        self.acquire(agents, executed(message))
        both: dict[int, Knowledge] = {id(None): message}
        for agent in agents.tolist():
            before = self._heard[agent]
            if id(before) not in both:
                both[id(before)] = joined(before, message)
            self._heard[agent] = both[id(before)]

    def fence_acquire(self, agents: np.ndarray, scopes: int = CLUSTER) -> None:
        """What relaxed waits and reads before it heard of is known."""
        self.flags.acquire(agents, scopes)
        heard = self._heard[agents]
        for message in {id(each): each for each in heard if each is not None}.values():
            whose = agents[[each is message for each in heard]]
            self.acquire(whose, message)
            self._heard[whose] = None

    def fence_release(self, agents: np.ndarray, scopes: int = CLUSTER) -> None:
        """What was seen is all that a relaxed arrival or access passes on, to the first ``scopes``
        scopes."""
        self._table_at_fence[:scopes, agents] = self._table_of[agents]
        self._own_at_fence[:scopes, agents] = self.now

    def fence_tensor(self, agents: np.ndarray, before: bool) -> None:
        """tcgen05.fence::before_thread_sync, or ::after_thread_sync."""
        if self.tensor:
            source, into = (TENSOR, PASSED) if before else (PASSED, TENSOR)
            self._copy_row(agents, source, into)

    def _copy_row(self, agents: np.ndarray, source: int, into: int) -> None:
        def copy(known: Knowledge) -> Knowledge:
            new = known.copy()
            np.maximum(new[into], new[source], out=new[into])
            return new

        self._replace(agents, copy)

    def fence_inits(self, agents: np.ndarray) -> None:
        """Any arrival passes on the mbarriers that these agents have initialized."""
        self._own_inits[agents] = self.now

    def initialized(
        self, agents: np.ndarray, column: int, event: int, by_proxy: bool
    ) -> np.ndarray:  # fmt: skip
        """Which agents know by a fence that ``column`` initialized an mbarrier at the event; with
        ``by_proxy``, by one that is for the asynchronous proxy, too."""
        tables = self._table_of[agents]
        own = {FENCED: self._own_fenced, INITS: self._own_inits}
        knows = np.zeros(len(agents), bool)
        for row in (FENCED, INITS) if by_proxy else (INITS,):
            for i in self._distinct(tables):
                table = self._tables[i]
                if column < table.shape[1] and table[row, column] >= event:
                    knows |= (tables == i) & (agents != column)
            if column < self.agents:
                knows |= (agents == column) & (own[row][agents] >= event)
        return knows

    # --- cp.async: see lane_copies ---

    def lane_columns(self, agents: np.ndarray) -> np.ndarray:
        """The columns of the copies of these agents."""
        for agent in agents[self._column_of[agents] == 0].tolist():
            if not self._column_of[agent]:
                self._column_of[agent] = self._told["cp.async", agent] = self._take(True)
        return np.asarray(self._column_of[agents])

    def tables_of(self, agents: np.ndarray) -> tuple[list[Knowledge], np.ndarray]:
        """What these agents know: tables, and whose is which."""
        tables = self._table_of[agents]
        used = self._distinct(tables)
        return [self._tables[i] for i in used], np.searchsorted(used, tables)

    def at_fences(
        self, agents: np.ndarray
    ) -> tuple[list[tuple[list[Knowledge], np.ndarray]], np.ndarray]:
        """The same as of their last fences of scope CTA and CLUSTER, and their own events then."""
        found = []
        for row in self._table_at_fence[:CLUSTER]:
            tables = row[agents]
            used = self._distinct(tables)
            found.append(([self._tables[i] for i in used], np.searchsorted(used, tables)))
        return found, self._own_at_fence[:CLUSTER, agents]

    def fenced_by(self, agents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Their own events before a proxy fence, and those of mbarrier.init before its fence."""
        return self._own_fenced[agents], self._own_inits[agents]

    def wait_for_own(self, agents: np.ndarray, events: np.ndarray) -> None:
        """Each agent knows its copies up to such an event; 0: it has waited for none."""
        columns = self._column_of[agents]
        tables, which = self.tables_of(agents)
        known = np.zeros((len(agents), self._rows, self.columns), np.uint32)
        for i, table in enumerate(tables):
            known[which == i, :, : table.shape[1]] = table
        lanes = np.arange(len(agents))
        lacks = known[lanes, SEEN, columns] < events
        if not lacks.any():
            return
        if len(self._tables) + len(agents) >= self._limit:
            self._forget()
        for row in range(min(self._rows, TENSOR)):
            known[lanes[lacks], row, columns[lacks]] = events[lacks]
        for lane in lanes[lacks].tolist():
            self._table_of[agents[lane]] = self._place(known[lane])
        self.version += 1

    def wait_for_predecessor(self, agents: np.ndarray) -> None:
        """These agents know that the kernel before is over, with all that it did."""
        if self.predecessor is not None:
            message = np.zeros((self._rows, self.columns), np.uint32)
            message[:, self.predecessor] = 1
            self.acquire(agents, message)

    def seen_by(self, agents: np.ndarray) -> np.ndarray:
        """The last event of each column that one of these agents at least has seen."""
        known = np.zeros(self.columns, np.uint32)
        for i in self._distinct(self._table_of[agents]):
            row = self._tables[i][SEEN]
            np.maximum(known[: len(row)], row, out=known[: len(row)])
        known[agents] = self.now
        return known

    # --- what passes through global memory ---

    def passed(self, agent: int, scope: int | None = None) -> Knowledge:
        """The rows SEEN and FENCED that an agent passes on; with a scope, as of its last fence."""
        own, number = self.now, self._table_of[agent]
        if scope is not None:
            own = int(self._own_at_fence[scope, agent])
            number = self._table_at_fence[scope, agent]
        rows = self._fit(self._tables[number])[: FENCED + 1].copy()
        rows[SEEN, agent] = own
        rows[FENCED, agent] = max(rows[FENCED, agent], min(own, self._own_fenced[agent]))
        return rows

    def fenced_at(self, agent: int, scope: int) -> int:
        """The event of an agent's last fence of a scope, 0: none."""
        return int(self._own_at_fence[scope, agent])

    def passed_by(self, actor: Actor) -> Knowledge:
        """The same of a work, as of its issue."""
        return self._fit(actor.known)[: FENCED + 1]

    def learn(self, agents: np.ndarray, rows: Knowledge) -> None:
        """Agents acquire such rows of this cluster."""
        message = np.zeros((self._rows, rows.shape[1]), np.uint32)
        message[: FENCED + 1] = rows
        self.acquire(agents, message)

    # --- asynchronous work ---

    def _at_issue(self, issuers: np.ndarray, tensor: bool) -> Knowledge:
        """What is known to work that these agents issue."""
        known = self.release(issuers)
        if tensor:
            known[TENSOR] = self._together(self._table_of[issuers])[TENSOR]
            known[TENSOR, issuers] = self.now
        return known

    def begin(
        self, issuers: np.ndarray, generic: bool = False, strong: bool = False,
        told: Hashable = None, tensor: bool = False,
    ) -> Actor:  # fmt: skip
        """A copy, not ordered with any other.

        ``told``: the mbarriers by which alone others learn of it. Copies that tell the same ones
        have one column: who has waited for a phase knows those of it and of earlier ones, and
        events of later ones are later.
        """
        column = None if told is None else self._told.get((told, generic))
        if column is None:
            column = self._take(generic)
            if told is not None:
                self._told[told, generic] = column
        tensor &= self.tensor
        known, shares = self._at_issue(issuers, tensor), told is not None
        return Actor(column, known, int(issuers[0]), None, tensor, generic, strong, shares)

    def _take(self, generic: bool) -> int:
        """A column that nobody has."""
        if not self._free:
            self._reclaim()
        column = self._free.pop()
        self.is_generic[column] = generic
        return column

    def _reclaim(self) -> None:
        """Columns of copies that nobody needs any more; new ones if these are few.

        A copy is needed while it is in flight, and as long as one of its accesses is the last to
        some place: without that nothing can be compared with it, and it can be forgotten.
        """
        needed = {column for user in self.users for column in user()}
        needed.update(self._told.values())
        copies = range(self.columns - 1, self._first_copy - 1, -1)
        self._free = [column for column in copies if column not in needed]
        if len(self._free) < len(copies) // 2:
            more = len(copies)
            if self.columns + more >= MOST_COLUMNS:
                raise PtxError(f"more than {self.columns} accessors that nobody has waited for")
            self._free += range(self.columns + more - 1, self.columns - 1, -1)
            self.columns += more
            self.is_generic = np.concatenate([self.is_generic, np.zeros(more, bool)])
            self.version += 1

    def follow(self, issuers: np.ndarray, name: Hashable, tensor: bool = False) -> Actor:
        """Work in a pipe: it knows of all earlier work there."""
        pipe = self._pipes.get(name)
        if pipe is None:
            pipe = self._pipes[name] = Pipe(self._next_pipe)
            self._next_pipe += 1
            if self._next_pipe > self._first_copy:
                raise ValueError(f"no column for the pipe {name!r}")
        tensor &= self.tensor
        known = self._at_issue(issuers, tensor)
        pipe.known = known if pipe.known is None else joined(pipe.known, known)
        return Actor(pipe.column, pipe.known, int(issuers[0]), pipe, tensor)

    def freeing(self, agents: np.ndarray) -> Actor:
        """A tcgen05.dealloc: it is synchronous, and needs no tcgen05.fence::after_thread_sync."""
        known = self._at_issue(agents, self.tensor)
        if self.tensor:
            np.maximum(known[TENSOR], known[PASSED], out=known[TENSOR])
        agent = int(agents[0])
        return Actor(agent, known, agent, None, self.tensor, generic=True)

    def run_before(self, actor: Actor) -> np.ndarray:
        """What is over when a work begins, whatever it may see of memory."""
        return np.asarray(self._fit(actor.known)[RUN])

    def view_of(self, actor: Actor) -> tuple[np.ndarray, np.ndarray]:
        """What a work has seen, and what of that through its own proxy."""
        view = actor.view
        if view is None or len(view[0]) < self.columns:
            known = self._fit(actor.known)
            seen, fenced = known[SEEN], known[FENCED]
            through = seen if actor.generic else np.where(self.is_generic, fenced, seen)
            view = actor.view = seen, through
        return view

    def tensor_view(self, actor: Actor) -> np.ndarray | None:
        """What a tcgen05 instruction may rely on; None where that is all it has seen."""
        return self._fit(actor.known)[TENSOR] if actor.tensor else None

    def was_passed(self, actor: Actor, column: int, event: int) -> bool:
        """Whether a tcgen05.fence::after_thread_sync is all that a tcgen05 instruction lacks."""
        return event <= int(self._fit(actor.known)[PASSED, column])

    # --- messages ---

    def named(self, site: Site, column: int) -> str:
        """A site with the thread, where the column is of one."""
        return named(site, column, self.agents, self.warps * self.lanes, self.lanes)

    def of_one_warp(self, agent: int, column: int, event: int) -> bool:
        """Whether the event of ``column`` is by a lane of the agent's warp, or known to one."""
        if self.lanes == 1:
            return False
        first = agent // self.lanes * self.lanes
        together = self.seen_by(np.arange(first, first + self.lanes))
        return bool(event <= together[column])


def named(site: Site, column: int, agents: int, of_cta: int, lanes: int) -> str:
    """A site with the thread, where the column is one of the agents, ``of_cta`` of each CTA."""
    if lanes == 1 or column >= agents:
        return str(site)
    return str(replace(site, who=f"thread {column % of_cta} of {site.who}"))
