"""cp.async: copies of 4 to 16 bytes a thread, and the groups that asynchronous copies form.

PTX ISA 9.7.9.25.3 (non-bulk) and 9.7.9.25.4 (commit_group and wait_group of bulk copies).
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

import numpy as np

from ..clocks.knowledge import Actor
from ..clocks.lane_copies import Copies
from ..machine.engine import Work
from ..machine.ports import read_global, write_shared
from ..machine.state import CTA, Fragment, Step, Wait
from ..ptx.program import Immediate
from .access import checked
from .mbarrier import addresses, find, visible
from .registry import Form, instruction

__all__ = ["Groups", "groups"]


class Groups:
    """The groups of copies of each thread of a CTA, of one kind."""

    def __init__(self) -> None:
        self.open: dict[int, list[Work]] = {}
        self.closed: dict[int, deque[list[Work]]] = {}

    def add(self, threads: np.ndarray, work: Work) -> None:
        for thread in threads.tolist():
            self.open.setdefault(thread, []).append(work)

    def commit(self, threads: np.ndarray) -> None:
        for thread in threads.tolist():
            self.closed.setdefault(thread, deque()).append(self.open.pop(thread, []))

    def older(self, threads: np.ndarray, keep: int) -> list[Work]:
        """The copies of all groups of these threads but the last ``keep``, each once."""
        found: dict[int, Work] = {}
        for thread in threads.tolist():
            mine = self.closed.get(thread, ())
            for group in islice(mine, max(len(mine) - keep, 0)):
                for work in group:
                    found[id(work)] = work
        return list(found.values())

    def waited(self, threads: np.ndarray, keep: int) -> np.ndarray:
        """The event of the last cp.async of each thread in such a group, 0: there is none."""
        last = np.zeros(len(threads), np.uint32)
        for i, thread in enumerate(threads.tolist()):
            mine = self.closed.get(thread, ())
            for group in islice(reversed(mine), keep, None):
                if group and isinstance(group[-1].actor, Copies):
                    last[i] = group[-1].actor.event
                    break
        return last

    def drop(self, threads: np.ndarray, keep: int) -> None:
        for thread in threads.tolist():
            mine = self.closed.get(thread)
            while mine and len(mine) > keep:
                mine.popleft()

    def all(self, threads: np.ndarray) -> list[Work]:
        mine = [work for thread in threads.tolist() for work in self.open.get(thread, ())]
        return self.older(threads, 0) + mine


def groups(cta: CTA, kind: str) -> Groups:
    found: Groups = cta.groups.setdefault(kind, Groups())
    return found


def learn(w: Fragment, works: list[Work], reads: bool) -> None:
    """Each thread that waited for its own of these knows what they did, or only read."""
    order = w.cta.cluster.order
    if order is None:
        return
    whose: dict[bytes, list[Work]] = {}
    for work in works:
        if isinstance(work.actor, Actor):
            whose.setdefault(work.threads.tobytes(), []).append(work)
    for own in whose.values():
        waiting = np.intersect1d(w.threads, own[0].threads)
        actors = [work.actor for work in own if isinstance(work.actor, Actor)]
        order.acquire(w.cta.agents(waiting), order.join(actor.message() for actor in actors))
        if w.cta.launch.races is not None and not reads:
            w.cta.launch.races.waited(actors, order.event(w.site()))


def wait_for(w: Fragment, works: list[Work], reads: bool, what: str) -> Wait | None:
    """A wait until these are done, or have read their source; None if they have."""

    left = deque(works)

    def ready() -> bool:
        while left and (left[0].done if reads else left[0].finished):
            left.popleft()
        return not left

    def why() -> str:
        count = sum(not (work.done if reads else work.finished) for work in left)
        return f"{what}: {count} in flight, {left[0].location()}"

    if ready():
        learn(w, works, reads)
        return None
    return Wait(ready, why)


def warps(w: Fragment) -> list[Fragment]:
    """The fragment in parts of one warp each."""
    number = w.threads // 32
    each = np.unique(number)
    return [w] if len(each) == 1 else [w.part(number == warp, w.pc) for warp in each]


@instruction("cp.async")
def cp_async(form: Form) -> Step:
    """cp.async.{ca,cg}.shared.global [dst], [src], size[, src-size | ignore-src][, policy]."""
    level = form.one("ca", "cg")
    if not form.has("shared", "shared::cta") or not form.has("global") or level is None:
        raise form.error("expected .ca or .cg, .shared and .global")
    form.one("L2::64B", "L2::128B", "L2::256B")
    operands = len(form.ins.operands)
    if form.has("L2::cache_hint"):
        operands -= 1
        form.get(operands, "b64")
    target, source, size_of = form.address(0, "shared"), form.address(1), form.get(2, "u32")
    ignores = operands > 3 and form.is_predicate(3)
    given = form.get(3, "pred" if ignores else "u32") if operands > 3 else None

    def run(w: Fragment) -> None:
        for part in warps(w):
            size = int(np.max(size_of(part)))
            if size not in ((16,) if level == "cg" else (4, 8, 16)):
                raise form.error(f"copies {size} bytes; allowed are 16, with .ca also 4 and 8")
            lengths = np.full(part.n, size)
            if given is not None:
                value = np.broadcast_to(given(part), part.n)
                lengths = np.where(value, 0, size) if ignores else value.astype(np.int64)
            if (lengths > size).any():
                raise form.error(f"src-size {int(lengths.max())} is larger than the size {size}")
            each = np.unique(lengths)
            for length in each:
                whose = part if len(each) == 1 else part.part(lengths == length, part.pc)
                issue(whose, size, int(length))

    def issue(w: Fragment, size: int, length: int) -> None:
        """Copies of ``size`` bytes, of which all lanes read ``length``."""
        to = checked(w, form, np.array(target(w)), size)
        at = checked(w, form, np.array(source(w)), size)
        cluster, launch = w.cta.cluster, w.cta.launch
        for address in (to.min(), to.max()):
            cluster.shared(int(address), size)

        def copy(work: Work) -> None:
            values = np.zeros((len(to), size), np.uint8)
            if length:
                values[:, :length] = read_global(work, launch, at, length)
            write_shared(work, to, values)

        actor = None
        if cluster.order is not None:
            reading = np.arange(len(to) if length else 0)
            actor = Copies(cluster.order, w.agents(), w.site(), reading)
        work = Work(w, copy, needs=(w.cta,), actor=actor)
        groups(w.cta, "cp.async").add(w.threads, work)
        cluster.engine.submit(work)

    return run


@instruction("cp.async.commit_group", "cp.async.bulk.commit_group")
def commit_group(form: Form) -> Step:
    kind = "bulk" if "bulk" in form.parts else "cp.async"

    def run(w: Fragment) -> None:
        groups(w.cta, kind).commit(w.threads)

    return run


@instruction("cp.async.wait_group", "cp.async.wait_all", "cp.async.bulk.wait_group", control=True)
def wait_group(form: Form) -> Step:
    """Wait until at most n groups are pending; .read: until their sources have been read."""
    kind = "bulk" if "bulk" in form.parts else "cp.async"
    every = form.parts[-1] == "wait_all"
    reads = kind == "bulk" and form.has("read")
    if not every and not isinstance(form.operand(0), Immediate):
        raise form.error("the number of groups must be an immediate")
    keep_of = None if every else form.get(0, "u32")

    def run(w: Fragment) -> Any:
        mine = groups(w.cta, kind)
        keep = 0 if keep_of is None else int(np.max(keep_of(w)))
        if every:
            mine.commit(w.threads)
        wait = wait_for(w, mine.older(w.threads, keep), reads, form.ins.opcode)
        order = w.cta.cluster.order
        if wait is None and kind == "cp.async" and order is not None:
            order.wait_for_own(w.agents(), mine.waited(w.threads, keep))
        if wait is None and not reads:
            mine.drop(w.threads, keep)
        return wait

    return run


@instruction("cp.async.mbarrier.arrive")
def arrive(form: Form) -> Step:
    """Arrive once all earlier cp.async of the thread are done; .noinc: as one that was counted."""
    counted = form.has("noinc")
    space = form.one("shared", "shared::cta")
    form.type("b64")
    where = addresses(form, 0, space)

    def run(w: Fragment) -> None:
        cluster, mine = w.cta.cluster, groups(w.cta, "cp.async")
        for i, address in enumerate(where(w)):
            barrier = find(w.cta, int(address))
            visible(w, barrier)
            if not counted:
                barrier.pending += 1
            earlier = tuple(mine.all(w.threads[i : i + 1]))

            def signal(
                work: Work, barrier: Any = barrier, earlier: Any = earlier,
                thread: int = int(w.threads[i]),
            ) -> None:  # fmt: skip
                for other in earlier:
                    if isinstance(other.actor, Copies):
                        lane = int(np.searchsorted(other.threads, thread))
                        barrier.learn(other.actor.message(lane))
                barrier.arrive()

            cluster.engine.submit(Work(w, signal, after=earlier, needs=(w.cta,)))

    return run
