"""Asynchronous work in flight: copies, tensor-core instructions, and when they complete.

The order of completion is the emulator's choice, within what the hardware may do:

- ``eager``: at once;
- ``late``: only when nothing else can move, one piece at a time;
- ``random``: at any moment, as the seed says.

Work of one pipe completes in the order of its issue; everything else in any order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from ..clocks.knowledge import Actor
from ..ptx.program import PtxError
from .undefined import Origin, View

if TYPE_CHECKING:
    from ..alarms.errors import Site
    from ..clocks.knowledge import Knowledge
    from ..clocks.lane_copies import Copies
    from ..observe.watch import Watch
    from .state import CTA, Fragment

__all__ = ["COMPLETIONS", "Engine", "Work"]

COMPLETIONS = ("eager", "late", "random")
_QUIET = 1 << 15  # instructions
_NUMBER = attrgetter("number")


class Work:
    """One asynchronous operation.

    Args:
        issuer: the fragment that issues it, standing at the instruction.
        run: what it does when it completes.
        pipe: name of the pipe that keeps its order; None: it has none.
        after: what must be done before it.
        needs: CTAs whose shared memory must live until it is done.
        actor: its place in the order of things; None where nothing is checked.
        exit: the check that those CTAs know it to be complete when they exit.
    """

    __slots__ = (
        "actor", "after", "done", "exit", "issuer", "line", "needs", "number", "origin", "pipe",
        "rest", "run", "threads", "tick", "used", "view", "what",
    )  # fmt: skip

    def __init__(
        self,
        issuer: Fragment,
        run: Callable[[Work], None],
        *,
        pipe: Hashable = None,
        after: tuple[Work, ...] = (),
        needs: tuple[CTA, ...] = (),
        actor: Actor | Copies | None = None,
        exit: str = "exit",
    ) -> None:
        instruction = issuer.frame.function.instructions[issuer.pc]
        self.what, self.line = instruction.opcode, instruction.line
        self.issuer = (issuer.cta, issuer.frame.code, issuer.pc)
        self.threads, self.used = issuer.threads, issuer.used
        self.run, self.pipe, self.after, self.needs = run, pipe, after, needs
        self.actor, self.exit = actor, exit
        if actor is not None:
            for cta in needs:
                cta.users.add(self)
        self.view = View.USED  # of undefined bits that it reads, and where they are from
        self.origin: Origin | None = None
        self.done = False
        self.tick = 0  # when it was issued
        self.number = 0  # in the order of issue
        self.rest: Work | None = None  # what it leaves to be done, once it has read its source

    @property
    def finished(self) -> bool:
        return self.done and (self.rest is None or self.rest.finished)

    def message(self) -> Knowledge | None:
        """What those who wait for it learn."""
        return self.actor.message() if isinstance(self.actor, Actor) else None

    def location(self) -> str:
        cta, code, pc = self.issuer
        return f"{cta}, {code.location(pc)}"

    def site(self) -> Site:
        cta, code, pc = self.issuer
        return code.site(pc, cta)

    def complete(self) -> None:
        for cta in self.needs:
            if not cta.alive and self.actor is None:  # for the others CTA.leave knows
                cta.outlived(self)
        try:
            self.run(self)
        except PtxError as error:
            if error.line is not None:
                raise
            raise type(error)(f"{error.message}; {self.location()}", self.line) from None
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise PtxError(f"emulator: {error!r}; {self.location()}", self.line) from error
        self.done = True
        self.run = _over  # what it moved is given back now, not when garbage is collected


def _over(work: Work) -> None:
    raise AssertionError(f"{work.location()} completes twice")


class Engine:
    """The asynchronous work of a cluster.

    Args:
        completion: one of COMPLETIONS.
        seed: of the random order.
        watch: is told of issues and completions.
    """

    def __init__(self, completion: str, seed: Any, watch: Watch | None) -> None:
        self.completion, self.watch = completion, watch
        self.random = np.random.default_rng(seed) if completion == "random" else None
        self.flying: list[Work] = []  # in the order of their issue, as _ready
        self._issued = 0
        self._pipes: dict[Hashable, deque[Work]] = {}
        self._ready: list[Work] = []
        self._held: list[Work] = []  # until others are done
        self.tick = 0  # instructions that the cluster had run when the last turn ended
        self.moved = 0  # that, when work last completed, a wait ended or threads exited
        #: Stores to shared memory but for atomics that changed nothing, and phases that ended.
        self.stores = 0
        self.base = 0  # and those before the fragment that is running now began its quantum

    @property
    def quiet(self) -> bool:
        """Nothing but instructions for long."""
        return self.tick - self.moved >= _QUIET

    def submit(self, work: Work) -> None:
        work.number = self._issued
        self._issued += 1
        self.flying.append(work)
        if work.pipe is None:
            self._comes_first(work)
        else:
            queue = self._pipes.setdefault(work.pipe, deque())
            queue.append(work)
            if len(queue) == 1:
                self._comes_first(work)
        work.tick = self.base + work.used
        if self.watch is not None:
            self.watch.issued(work, work.tick)
        if self.completion == "eager":
            self._complete(work)

    def turn(self) -> None:
        """Between two turns of the warps: with random completion, something may happen."""
        if self.random is not None and self.flying and self.random.random() < 0.3:
            self.force()

    def force(self) -> bool:
        """Complete one piece of work; False if there is none."""
        if not self.flying:
            return False
        ready = self._may_complete()
        at = 0 if self.random is None else int(self.random.integers(len(ready)))
        self._complete(ready[at])
        return True

    def _comes_first(self, work: Work) -> None:
        """Nothing is before it in its pipe."""
        if work.after:
            self._held.append(work)
        else:
            insort(self._ready, work, key=_NUMBER)

    def _may_complete(self) -> list[Work]:
        free = [work for work in self._held if all(other.done for other in work.after)]
        for work in free:
            self._held.remove(work)
            insort(self._ready, work, key=_NUMBER)
        return self._ready

    def _leaves(self, work: Work) -> None:
        """It is in flight no more, and whoever is behind it in its pipe comes first."""
        _drop(self.flying, work)
        if not _drop(self._ready, work) and work in self._held:
            self._held.remove(work)
        if work.pipe is not None:
            queue = self._pipes[work.pipe]
            was_first = queue[0] is work
            queue.remove(work)
            if was_first and queue:
                self._comes_first(queue[0])

    def finish(self, work: Work) -> None:
        """Complete this one now: somebody needs it."""
        if not work.done:
            self._complete(work)

    def _complete(self, work: Work) -> None:
        self._leaves(work)
        self.moved = self.tick
        work.complete()
        if self.watch is not None:
            self.watch.completed(work, max(self.tick, work.tick))


def _drop(works: list[Work], work: Work) -> bool:
    """Take a work out of a list in the order of issue; whether it was there."""
    at = bisect_left(works, work.number, key=_NUMBER)
    if at == len(works) or works[at] is not work:
        return False
    del works[at]
    return True
