"""Loops that spin on memory: an iteration that changes nothing need not be run again.

While a fragment has its turn nobody else runs. So a loop of loads, of atomics that change nothing
and of what only gives values will do the same until the turn is over, once an iteration has left
the registers that it writes as they were. What is left of the turn is counted and not run: the same
as before happens, in less time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..clocks.scopes import strength
from ..machine.state import Fragment
from ..ptx.program import Instruction, Label
from .careful import only_gives

__all__ = ["Spin", "Turn", "spin"]

_LONGEST = 64  # instructions of a loop that is looked at
_IDEMPOTENT = ("bra", "fence", "membar")


@dataclass(frozen=True, slots=True)
class Spin:
    """A loop that may spin.

    Attributes:
        slots: registers that it writes.
        acts: places of instructions that a spinning iteration passes over.
    """

    slots: tuple[int, ...]
    acts: tuple[int, ...]


def spin(
    instructions: list[Instruction], results: list[tuple[int, ...]], first: int, last: int
) -> Spin | None:
    """The loop from ``first`` to the jump back at ``last``; None: it does not spin on memory, or
    each iteration does more than that.

    Args:
        results: slots of the registers that each instruction writes.
    """
    if last - first >= _LONGEST:
        return None
    looks, passed_over, acts = False, first, []
    for pc in range(first, last + 1):
        ins = instructions[pc]
        family, waits = ins.parts[0], ins.parts[:2] == ("mbarrier", "test_wait")
        if family == "bra":
            label = ins.operands[0]
            passed_over = max(passed_over, label.target if isinstance(label, Label) else 0)
        looks |= waits or (family in ("ld", "atom") and strength(ins.parts) is not None)
        if waits or family in ("atom", *_IDEMPOTENT) or only_gives(ins, results[pc]):
            continue
        if pc >= passed_over:
            return None
        acts.append(pc)
    written = {slot for slots in results[first : last + 1] for slot in slots}
    return Spin(tuple(written), tuple(acts)) if looks else None


class Turn:
    """What is known of the loop that a fragment is in, in one of its turns."""

    def __init__(self) -> None:
        self._jump: tuple[int, int] | None = None
        self._spin: Spin | None = None
        self._before: list[Any] | None = None
        self._used = 0
        self._counts: list[int] = []

    def jumps(self, w: Fragment, pc: int, to: int, used: int) -> int:
        """Instructions of the turn that need not be run: whole iterations; they are counted.

        Args:
            pc, to: of a jump back.
            used: instructions of the turn until there.
        """
        code = w.frame.code
        if self._jump != (pc, to):
            self._jump, self._before, self._spin = (pc, to), None, code.spin(to, pc)
        spin, engine = self._spin, w.cta.cluster.engine
        if spin is None or w.frame.undefined or engine.watch is not None:
            return 0
        here = [w.threads, engine.altered, *(code.counts[at] for at in spin.acts)]
        here += [w.R[slot][w.sel].tobytes() for slot in spin.slots]
        before, self._before = self._before, here
        length, self._used = used - self._used, used
        counts, self._counts = self._counts, code.counts[to : pc + 1]
        if before is None or before[0] is not here[0] or before[1:] != here[1:]:
            return 0
        times = (w.cta.cluster.quantum - used) // length
        for at, (earlier, now) in enumerate(zip(counts, self._counts, strict=True), to):
            code.counts[at] += times * (now - earlier)
        self._before = None
        return times * length
