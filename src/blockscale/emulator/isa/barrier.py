"""Barriers of a CTA and of a cluster: PTX ISA 9.7.13."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..clocks.knowledge import Knowledge, executed, joined
from ..machine.state import CTA, Fragment, Split, Step, Wait
from .registry import Form, instruction

_NONE, _HALF, _ARRIVING = -1, -2, -3


def pass_on(phases: dict[int, Knowledge], phase: int, known: Knowledge) -> None:
    """Add what an arrival releases to what the end of its phase will tell."""
    before = phases.get(phase)
    phases[phase] = known if before is None else joined(before, known)


class Barrier:
    """A named barrier of a CTA.

    Arrivals count in warps: a warp whose lanes have diverged counts once the last of them is here.
    """

    def __init__(self, cta: CTA) -> None:
        self.cta = cta
        self.phase = 0
        self.counted = np.zeros(-(-cta.size // 32), bool)  # warps that arrived in this phase
        self.repeats = 0  # bar.arrive by a warp that has arrived already
        self.expected = 0  # threads; 0: every warp that is alive
        self.wanted = np.zeros(cta.size, np.int64)  # the same, as each thread says
        # Of each thread: the phase whose end it waits for, or one of the codes above.
        self.ticket = np.full(cta.size, _NONE)
        self.votes: dict[int, tuple[int, int]] = {}  # phase -> predicates that were true, all
        self.vote = np.zeros(cta.size, bool)
        self.passed_on: dict[int, Knowledge] = {}  # phase -> what its arrivals released

    def arrive(self, threads: np.ndarray, waits: bool, expected: int, vote: Any) -> None:
        self.vote[threads], self.wanted[threads] = vote, expected
        self.ticket[threads] = _HALF if waits else _ARRIVING
        for warp in np.unique(threads // 32):
            self.count(int(warp))

    def count(self, warp: int) -> None:
        """Count a warp if all its lanes are here, and end the phase if it was the last."""
        lanes = slice(32 * warp, 32 * warp + 32)
        here = self.ticket[lanes] <= _HALF
        if not here.any() or not (here | self.cta.exited[lanes]).all():
            return
        expected = int(self.wanted[lanes][here].max())
        if expected and self.expected and expected != self.expected:
            raise ValueError(
                f"{expected} threads expected, but {self.expected} by the first to arrive"
            )
        self.expected = expected or self.expected
        order = self.cta.cluster.order
        if order is not None:
            known = order.release(self.cta.agents(32 * warp + np.nonzero(here)[0]))
            pass_on(self.passed_on, self.phase, known)
        if self.counted[warp]:
            self.repeats += 1
        self.counted[warp] = True
        yes, every = self.votes.get(self.phase, (0, 0))
        self.votes[self.phase] = (
            yes + int((self.vote[lanes] & here).sum()), every + int(here.sum())
        )  # fmt: skip
        waiting = self.ticket[lanes] == _HALF
        self.ticket[lanes] = np.where(
            waiting, self.phase, np.where(here, _NONE, self.ticket[lanes])
        )
        self.settle()

    def settle(self) -> None:
        """End the phase if everybody is here: those who exited are not waited for."""
        if not self.counted.any():
            return
        arrived = 32 * (int(self.counted.sum()) + self.repeats)
        if self.expected:
            done = arrived >= self.expected
        else:
            gone = np.logical_and.reduceat(self.cta.exited, np.arange(0, self.cta.size, 32))
            done = bool((self.counted | gone).all())
        if done:
            self.votes.pop(self.phase - 8, None)
            self.passed_on.pop(self.phase - 8, None)
            self.phase += 1
            self.counted[:] = False
            self.repeats = self.expected = 0

    def over(self, threads: np.ndarray) -> np.ndarray:
        tickets = self.ticket[threads]
        return (tickets >= 0) & (tickets < self.phase)

    def look(self) -> None:
        """What exits have changed: warps complete without their exited lanes."""
        for warp in np.unique(np.nonzero(self.ticket <= _HALF)[0] // 32):
            self.count(int(warp))
        self.settle()

    def describe(self) -> str:
        if self.expected:
            return f"{32 * int(self.counted.sum())} of {self.expected} threads are there"
        return f"{int(self.counted.sum())} of {len(self.counted)} warps are there"


@instruction("bar", "barrier", "barrier.cta", control=True)
def bar(form: Form) -> Step:
    """bar.sync a[, b]; bar.arrive a, b; bar.red.{popc,and,or} d, a[, b], p: 9.7.13."""
    form.has("cta")
    mode = form.one("sync", "arrive", "red")
    form.has("aligned")
    if mode is None:
        raise form.error("expected .sync, .arrive or .red")
    red = mode == "red"
    operation = form.one("popc", "and", "or") if red else None
    if red:
        form.type("u32" if operation == "popc" else "pred")
    put = form.set(0, "u32" if operation == "popc" else "pred") if red else None
    operands = len(form.ins.operands) - 2 * red
    number = form.get(int(red), "u32")
    count = form.get(int(red) + 1, "u32") if operands > 1 else None
    vote = form.get(int(red) + operands, "pred") if red else (lambda w: False)
    if mode == "arrive" and count is None:
        raise form.error("needs the number of threads")

    def run(w: Fragment) -> Any:
        numbers = np.broadcast_to(number(w), w.n)
        which = int(numbers[0])
        if (numbers != which).any():
            return Split(numbers == which)
        if which > 15:
            raise form.error(f"barrier {which}: there are 16")
        expected = 0 if count is None else int(np.max(count(w)))
        if expected % 32 or (count is not None and not expected):
            raise form.error(f"barrier {which} expects {expected} threads: no multiple of 32")
        barrier = w.cta.barriers.setdefault(which, Barrier(w.cta))
        new = barrier.ticket[w.threads] == _NONE
        if new.any():
            votes = np.broadcast_to(vote(w), w.n)[new]
            barrier.arrive(w.threads[new], mode != "arrive", expected, votes)
        if mode == "arrive":
            return None
        over = barrier.over(w.threads)
        if not over.any():
            threads = w.threads

            def ready() -> bool:
                barrier.look()
                return bool(barrier.over(threads).any())

            return Wait(ready, lambda: f"barrier {which}: {barrier.describe()}")
        over &= barrier.ticket[w.threads] == barrier.ticket[w.threads][over].min()
        if not over.all():
            return Split(over)
        if put is not None:
            yes, every = barrier.votes[int(barrier.ticket[w.threads[0]])]
            put(w, {"popc": yes, "and": yes == every, "or": yes > 0}[operation or ""])
        order = w.cta.cluster.order
        if order is not None:
            order.acquire(w.agents(), barrier.passed_on[int(barrier.ticket[w.threads[0]])])
        barrier.ticket[w.threads] = _NONE
        return None

    return run


class ClusterBarrier:
    """The one barrier of a cluster. Threads that have exited are not waited for: that they are
    over is known to those who wait, but not what they did to memory, which arrivals tell."""

    def __init__(self, ctas: list[CTA]) -> None:
        self.ctas = ctas
        self.phase = 0
        self.ticket = [np.full(cta.size, _NONE) for cta in ctas]
        self.passed_on: dict[int, Knowledge] = {}  # phase -> what its arrivals released

    def settle(self) -> None:
        pairs = list(zip(self.ctas, self.ticket, strict=True))
        if all(((ticket == self.phase) | cta.exited).all() for cta, ticket in pairs):
            for cta, ticket in pairs:
                gone = np.nonzero(cta.exited & (ticket != self.phase))[0]
                if len(gone) and cta.cluster.order is not None:
                    known = cta.cluster.order.release(cta.agents(gone))
                    pass_on(self.passed_on, self.phase, executed(known))
            self.phase += 1


@instruction("barrier.cluster", control=True)
def cluster(form: Form) -> Step:
    """arrive and wait of the barrier of all threads of the cluster: 9.7.13."""
    mode = form.one("arrive", "wait")
    relaxed = form.one("release", "acquire", "relaxed") == "relaxed"
    form.has("aligned")
    if mode is None:
        raise form.error("expected .arrive or .wait")

    def state(w: Fragment) -> ClusterBarrier:
        of = w.cta.cluster
        if of.barrier is None:
            of.barrier = ClusterBarrier(of.ctas)
        return of.barrier

    def arrive(w: Fragment) -> None:
        barrier = state(w)
        ticket = barrier.ticket[w.cta.rank]
        if (ticket[w.threads] != _NONE).any():
            raise form.error("a thread arrives twice without a wait between")
        order = w.cta.cluster.order
        if order is not None:
            known = order.release(w.agents(), relaxed)
            pass_on(barrier.passed_on, barrier.phase, known)
        ticket[w.threads] = barrier.phase
        barrier.settle()

    def wait(w: Fragment) -> Any:
        barrier, threads = state(w), w.threads
        ticket = barrier.ticket[w.cta.rank]
        if (ticket[threads] == _NONE).any():
            raise form.error("waits for the cluster barrier without having arrived")
        over = ticket[threads] < barrier.phase
        if over.all():
            order = w.cta.cluster.order
            if order is not None:
                order.acquire(w.agents(), barrier.passed_on[int(ticket[threads[0]])])
            ticket[threads] = _NONE
            return None
        if over.any():
            return Split(over)

        phase = int(ticket[threads].min())

        def why() -> str:
            here = sum(int((t == barrier.phase).sum()) for t in barrier.ticket)
            every = sum(map(len, barrier.ticket))
            return f"the barrier of its cluster: {here} of {every} threads are there"

        return Wait(lambda: phase < barrier.phase, why)

    return arrive if mode == "arrive" else wait
