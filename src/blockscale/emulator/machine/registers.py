"""Registers that asynchronous instructions hold, and what happens to who touches them.

tcgen05.ld fills registers later; the hardware makes who uses one of them wait, so here its use
completes the load. Operands of wgmma must not be touched until it is waited for, and what writes
them must be followed by wgmma.fence: PTX ISA 9.7.15.7.1, 9.7.15.7.3. mov is exempt, for compilers
put it anywhere (around the tied operands of inline assembly, as packing of halves): it needs no
fence, and completes the wgmma that it meets. ptxas removes it or waits, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from ..ptx.program import Address, Group, Instruction, Not, Operand, Pair, Register, Vector
from .engine import Work
from .state import Flight, Fragment, Step

__all__ = ["Loading", "Multiplying", "guarded", "loads_waited_for", "mark", "registers_of"]


class Loading(Flight):
    """Registers that a tcgen05.ld of one warp writes, until one of them is used: that warp knows
    then that the load is done. By the ISA it must have waited (9.7.16.8)."""

    __slots__ = ("frame", "site", "slots", "waited", "work")

    def __init__(self, w: Fragment, slots: Sequence[int], work: Work) -> None:
        super().__init__(w)
        self.frame, self.slots, self.work = w.frame, slots, work
        self.site, self.waited = w.site(), False
        for slot in slots:
            flights = w.frame.flights.setdefault(slot, [])
            for earlier in tuple(flights):
                if np.count_nonzero(earlier.threads & self.threads):
                    earlier.touched(w, "", True)
            flights.append(self)

    def touched(self, w: Fragment, register: str, writes: bool) -> None:
        cluster = w.cta.cluster
        if register and not self.waited:
            message = (
                f"{w.site()} {'writes' if writes else 'reads'} {register}, which {self.site} "
                "fills: tcgen05.wait::ld must come between"
            )
            cluster.launch.alarms.tell("tcgen05_order", message, w.site(), self.site)
        cluster.engine.finish(self.work)
        for slot in self.slots:
            self.frame.flights[slot].remove(self)
        known = self.work.message()
        if cluster.order is not None and known is not None:
            cluster.order.acquire(w.agents()[self.threads[w.threads]], known)


def loads_waited_for(w: Fragment) -> None:
    """tcgen05.wait::ld: what the warp has loaded may be used, in its callers, too."""
    for frame in (w.frame, *(entry[0] for entry in w.stack)):
        for flight in chain.from_iterable(frame.flights.values()):
            if isinstance(flight, Loading) and flight.threads[w.threads].any():
                flight.waited = True


class Multiplying(Flight):
    """Registers that a wgmma of one warpgroup reads and writes, until it has been waited for."""

    __slots__ = ("frame", "reads", "shape", "work", "writes")

    def __init__(
        self, w: Fragment, reads: tuple[int, ...], writes: tuple[int, ...], shape: str, work: Work
    ) -> None:
        super().__init__(w)
        self.frame, self.shape, self.work = w.frame, shape, work
        self.reads, self.writes = reads, writes
        for slot in {*reads, *writes}:
            w.frame.flights.setdefault(slot, []).append(self)

    def land(self) -> None:
        for slot in {*self.reads, *self.writes}:
            self.frame.flights[slot].remove(self)

    def touched(self, w: Fragment, register: str, writes: bool) -> None:
        ins = w.frame.function.instructions[w.pc]
        if ins.parts[0] == "mov":
            self._finish(w)
        else:
            w.cta.launch.alarms.tell(
                "registers",
                f"{ins.opcode} {'writes' if writes else 'reads'} "
                f"register {register}, which the {self.work.what} in line {self.work.line} still "
                "uses: wgmma.commit_group and wgmma.wait_group must come between",
                w.site(),
            )

    def _finish(self, w: Fragment) -> None:
        """Complete the work, and what its pipe has before it."""
        engine = w.cta.cluster.engine
        for work in [work for work in engine.flying if work.pipe == self.work.pipe]:
            if self.work.done:
                break
            engine.finish(work)


def registers_of(op: Operand) -> list[Register]:
    """The registers in an operand."""
    if isinstance(op, Register):
        return [op]
    if isinstance(op, Not):
        return [op.register]
    if isinstance(op, Address):
        return [r for part in (op.base, *op.more) for r in registers_of(part)]
    if isinstance(op, Vector | Group):
        return [r for part in op.items for r in registers_of(part)]
    if isinstance(op, Pair):
        return registers_of(op.first) + registers_of(op.second)
    return []


def guarded(step: Step, ins: Instruction, written: Sequence[int], held: frozenset[int]) -> Step:
    """The step of an instruction that writes slots and may touch registers in ``held`` (slots)."""
    operands = list(ins.operands)
    results = registers_of(operands[0]) if written else []
    sources = [r for op in operands[1 if written else 0 :] for r in registers_of(op)]
    used = [(r.slot, r.name, False) for r in sources if r.slot in held]
    used += [(r.slot, r.name, True) for r in results if r.slot in held]
    if not used:
        return step
    predicate, negated = ins.predicate, ins.negated
    marks = ins.parts[0] != "mov"

    def run(w: Fragment) -> Any:
        threads = w.threads
        if predicate is not None:
            threads = threads[w.R[predicate.slot][w.sel] ^ negated]
        frame = w.frame
        for slot, name, writes in used:
            for flight in tuple(frame.flights.get(slot, ())):
                if np.count_nonzero(flight.threads[threads]):
                    flight.touched(w, name, writes)
            if writes and marks:
                mark(w, slot)[threads] = True
        return step(w)

    return run


def mark(w: Fragment, slot: int) -> np.ndarray:
    """Which threads wrote a register since their last wgmma.fence."""
    found = w.frame.written.get(slot)
    if found is None:
        found = w.frame.written[slot] = np.zeros(w.cta.size, bool)
    return found
