"""Registers that asynchronous instructions hold, and what happens to who touches them.

tcgen05.ld fills registers later; the hardware makes who uses one of them wait, so here its use
completes the load. Operands of wgmma must not be touched until it is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .engine import Work
from .machine import Flight, Fragment, Step
from .program import Address, Group, Instruction, Not, Operand, Pair, Register, Vector

__all__ = ["Loading", "guarded", "mark"]

_NO_RESULT = ("st", "red", "bar", "bra", "brx", "mbarrier", "cp", "prefetch", "stmatrix", "wgmma")


class Loading(Flight):
    """Registers that a tcgen05.ld of one warp will write."""

    __slots__ = ("frame", "slots", "work")

    def __init__(self, w: Fragment, slots: Sequence[int], work: Work) -> None:
        threads = np.zeros(w.cta.size, bool)
        threads[w.threads] = True
        super().__init__(threads)
        self.frame, self.slots, self.work = w.frame, slots, work
        for slot in slots:
            for earlier in list(w.frame.flights.get(slot, ())):
                if (earlier.threads & threads).any():
                    earlier.touched(w, "", True)
            w.frame.flights.setdefault(slot, []).append(self)

    def land(self) -> None:
        for slot in self.slots:
            self.frame.flights[slot].remove(self)

    def touched(self, w: Fragment, register: str, writes: bool) -> None:
        cluster = w.cta.cluster
        cluster.engine.finish(self.work)
        if cluster.order is not None and self.work.actor is not None:
            cluster.order.acquire(
                np.unique(w.agents()[self.threads[w.threads]]), self.work.actor.message()
            )


def _registers(op: Operand) -> list[Register]:
    if isinstance(op, Register):
        return [op]
    if isinstance(op, Not):
        return [op.register]
    if isinstance(op, Address):
        return [r for part in (op.base, *op.more) for r in _registers(part)]
    if isinstance(op, Vector | Group):
        return [r for part in op.items for r in _registers(part)]
    if isinstance(op, Pair):
        return _registers(op.first) + _registers(op.second)
    return []


def guarded(step: Step, ins: Instruction, held: frozenset[int]) -> Step:
    """The step of an instruction that may touch registers in ``held`` (slots)."""
    operands = list(ins.operands)
    has_result = operands and not isinstance(operands[0], Address)
    has_result = has_result and ins.parts[0] not in _NO_RESULT
    results = _registers(operands[0]) if has_result else []
    sources = [r for op in operands[1 if has_result else 0 :] for r in _registers(op)]
    used = [(r.slot, r.name, False) for r in sources if r.slot in held]
    used += [(r.slot, r.name, True) for r in results if r.slot in held]
    if not used:
        return step
    predicate, negated = ins.predicate, ins.negated

    def run(w: Fragment) -> Any:
        threads = w.threads
        if predicate is not None:
            threads = threads[w.R[predicate.slot][w.sel] ^ negated]
        frame = w.frame
        for slot, name, writes in used:
            for flight in list(frame.flights.get(slot, ())):
                if flight.threads[threads].any():
                    flight.touched(w, name, writes)
            if writes:
                mark(w, slot)[threads] = True
        return step(w)

    return run


def mark(w: Fragment, slot: int) -> np.ndarray:
    """Which threads wrote a register since their last wgmma.fence."""
    found = w.frame.written.get(slot)
    if found is None:
        found = w.frame.written[slot] = np.zeros(w.cta.size, bool)
    return found
