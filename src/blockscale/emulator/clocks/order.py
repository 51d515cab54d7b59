"""Who happens before whom: vector clocks over the threads of a cluster and its asynchronous work.

There is one clock for the whole cluster: it counts accesses (see ``events``). Whoever accesses has
a *column* (see ``columns``): each agent one, which is a thread (or a warp, where its lanes are not
told apart), each tensor-core pipe one, for its work is in order, and each copy one as long as it
matters, for copies are not. What they know is tables over the columns: see ``knowledge``, and
``tables`` for who has which.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import numpy as np

from ..alarms.errors import Site
from .columns import Columns
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
from .scopes import CLUSTER, WEAK
from .shared_flags import SharedFlags
from .tables import Tables

__all__ = ["Order", "named"]

_VIEWS = 64


class Order(Tables):
    """The clock of a cluster, and what everybody knows.

    Args:
        ctas: CTAs of the cluster.
        warps: warps of each.
        lanes: lanes of a warp that are told apart: 32, or 1, which makes a warp one agent.
        programmatic: whether the kernel before this one has a column, too: it may still run when a
            programmatic launch begins.
        tensor: whether tables have the rows PASSED and TENSOR, for the check tcgen05_order.
        scopes: how many scopes of fences are told apart, from the narrowest one, CTA, on.
        runs: says whether a relaxed read must tell what was executed before: see SharedFlags.
        copies_fence: whether the wait for a cp.async is a proxy fence, too; not so for the check
            cp_async_proxy.
    """

    def __init__(
        self, ctas: int, warps: int, *, lanes: int = 32, programmatic: bool = False,
        tensor: bool = False, scopes: int = CLUSTER, runs: Callable[[], bool] = lambda: False,
        copies_fence: bool = True,
    ) -> None:  # fmt: skip
        self.warps, self.lanes, self.tensor = warps, lanes, tensor
        agents = ctas * warps * lanes
        pipes = ctas * (-(-warps // 4) + warps)
        who = Columns(agents, pipes, programmatic)
        super().__init__(who, 1 + (TENSOR if tensor else RUN), scopes, copies_fence)
        self.agents = agents
        self.predecessor = self.who.predecessor
        self._pipes: dict[Hashable, Pipe] = {}
        # The last own event of each agent before a fence of each kind.
        self._own_fenced = np.zeros(agents, np.uint32)
        self._own_inits = np.zeros(agents, np.uint32)
        #: What relaxed waits heard of, which an acquire fence makes known.
        self._heard = np.full(agents, None, object)
        self._views: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray | None]] = {}
        self._viewed = 0
        self.flags = SharedFlags(self, ctas, runs)

    # --- what agents know ---

    def view(self, agents: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """What agents (n,) have seen: rows of SEEN (rows, columns), and the number of each agent's
        row (n,), or None if all have the same."""
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

    def cta_of(self, agent: Any) -> Any:
        """The rank of the CTA of an agent, or of each of an array of agents."""
        return agent // (self.warps * self.lanes)

    def saw(self, agent: int, other: int) -> int:
        """The last event of another agent that an agent has seen."""
        if agent == other:
            return self.now
        row = self.table(agent)[SEEN]
        return int(row[other]) if other < len(row) else 0

    def table(self, agent: int) -> Knowledge:
        """The knowledge of an agent, in which its own events are not."""
        return self._tables[self._table_of[agent]]

    def fence_proxy(self, agents: np.ndarray) -> None:
        """Agents execute a proxy fence: work of theirs may rely on what they have seen."""
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

    def fence_acquire(
        self, agents: np.ndarray, scope: int = CLUSTER, total: bool = False
    ) -> None:  # fmt: skip
        """Agents execute a fence, which acquires what their relaxed waits and reads have heard;
        ``total``: a fence.sc."""
        threads = self.flags.threads(agents)
        self.flags.acquire(threads, scope, self.now)
        if total:
            self.flags.fences.learn(threads, scope)
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

    def fenced_by(self, agents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Their own events before a proxy fence, and those of mbarrier.init before its fence."""
        return self._own_fenced[agents], self._own_inits[agents]

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

    def over_for(self, agent: int) -> np.ndarray:
        """The last event of each column that an agent has seen, or, of its own warp, that is over,
        whatever it sees of memory."""
        known, warp = self.seen_by(np.array([agent])), self._warp(agent)
        known[warp] = np.maximum(known[warp], self._fit(self.table(agent))[RUN, warp])
        return known

    def _warp(self, agent: int) -> np.ndarray:
        """The agents of its warp."""
        first = agent // self.lanes * self.lanes
        return np.arange(first, first + self.lanes)

    # --- what passes through global memory ---

    def passed(self, agent: int) -> Knowledge:
        """The rows SEEN and FENCED that an agent passes on."""
        rows = self._fit(self._tables[self._table_of[agent]])[: FENCED + 1].copy()
        rows[SEEN, agent] = self.now
        rows[FENCED, agent] = max(rows[FENCED, agent], self._own_fenced[agent])
        return rows

    def passed_by(self, actor: Actor) -> Knowledge:
        """Those of a work, as of its issue."""
        return self._fit(actor.known)[: FENCED + 1]

    def learn(self, agents: np.ndarray, rows: Knowledge) -> None:
        """Agents acquire such rows of this cluster."""
        message = np.zeros((self._rows, rows.shape[1]), np.uint32)
        message[: FENCED + 1] = rows
        self.acquire(agents, message)

    # --- asynchronous work ---

    def _at_issue(self, issuers: np.ndarray, tensor: bool) -> Knowledge:
        """The knowledge of a work that these agents issue: theirs, and what they did."""
        known = self.release(issuers)
        if tensor:
            known[TENSOR] = self._together(self._table_of[issuers])[TENSOR]
            known[TENSOR, issuers] = self.now
        return known

    def begin(
        self, issuers: np.ndarray, generic: bool = False, code: int = WEAK,
        told: Hashable = None, tensor: bool = False,
    ) -> Actor:  # fmt: skip
        """A copy, not ordered with any other.

        ``told``: the mbarriers by which alone others learn of it. Copies that tell the same ones
        have one column: who has waited for a phase knows those of it and of earlier ones, and
        events of later ones are later.
        """
        column = self.who.copy(generic, told)
        tensor &= self.tensor
        known, shares = self._at_issue(issuers, tensor), told is not None
        return Actor(column, known, int(issuers[0]), None, tensor, generic, code, shares)

    def follow(self, issuers: np.ndarray, name: Hashable, tensor: bool = False) -> Actor:
        """Work in a pipe: it knows of all earlier work there."""
        pipe = self._pipes.get(name)
        if pipe is None:
            pipe = self._pipes[name] = Pipe(self.who.pipe(name))
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
        """The last event of each column that is over when a work begins, whatever it may see."""
        return np.asarray(self._fit(actor.known)[RUN])

    def view_of(self, actor: Actor) -> tuple[np.ndarray, np.ndarray]:
        """The last event of each column that a work has seen, and those it has seen through its own
        proxy."""
        view = actor.view
        if view is None or len(view[0]) < self.columns:
            known = self._fit(actor.known)
            seen, fenced = known[SEEN], known[FENCED]
            through = seen if actor.generic else np.where(self.who.is_generic, fenced, seen)
            view = actor.view = seen, through
        return view

    def tensor_view(self, actor: Actor) -> np.ndarray | None:
        """The last event of each column on which a tcgen05 instruction may rely; None where that is
        all it has seen."""
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
        return bool(event <= self.seen_by(self._warp(agent))[column])


def named(site: Site, column: int, agents: int, of_cta: int, lanes: int) -> str:
    """A site with the thread, where the column is one of the agents, ``of_cta`` of each CTA."""
    if lanes == 1 or column >= agents:
        return str(site)
    return str(replace(site, who=f"thread {column % of_cta} of {site.who}"))
