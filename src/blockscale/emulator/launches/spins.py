"""Loops that spin on memory: an iteration that changes nothing need not be run again.

A loop of loads, of atomics that change nothing and of what only gives values does the same again
and again, once an iteration has left the registers that it writes as they were, until somebody
stores something. Till then its turns are counted and not run: the same happens, in less time.
Lanes that meet others at another instruction wait there, and their iterations are in several turns:
those are run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..clocks.scopes import strength
from ..isa.meeting import GATHER
from ..machine.state import Fragment
from ..ptx.program import Instruction, Label, Special
from .careful import only_gives

__all__ = ["Spin", "Spinning", "Turn", "spin"]

_LONGEST = 64  # instructions of a loop that is looked at
_IDEMPOTENT = ("bra", "fence", "membar")
_CLOCKS = ("%clock", "%globaltimer")


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
    written = [slot for slots in results[first : last + 1] for slot in slots]
    if len(set(written)) < len(written):  # then its registers are not the same all the way
        return None
    looks, passed_over, acts = False, first, []
    for pc in range(first, last + 1):
        ins = instructions[pc]
        family, waits = ins.parts[0], ins.parts[:2] == ("mbarrier", "test_wait")
        if family == "bra":
            label = ins.operands[0]
            passed_over = max(passed_over, label.target if isinstance(label, Label) else 0)
        if any(isinstance(op, Special) and op.name.startswith(_CLOCKS) for op in ins.operands):
            return None  # time may pass
        looks |= waits or (family in ("ld", "atom") and strength(ins.parts) is not None)
        if waits or family in ("atom", *_IDEMPOTENT, *GATHER) or only_gives(ins, results[pc]):
            continue
        if pc >= passed_over:
            return None
        acts.append(pc)
    return Spin(tuple(written), tuple(acts)) if looks else None


class Spinning:
    """A fragment that spins: each iteration is as the one before, until somebody stores."""

    def __init__(self, w: Fragment, path: list[int]) -> None:
        self._path = path  # places of the instructions of an iteration
        self._threads, self._frame, self._stores = w.threads, w.frame, _stores(w)

    def goes_on(self, w: Fragment, meet: int) -> bool:
        """Whether it still does, and meets nobody there."""
        same = w.threads is self._threads and w.frame is self._frame and w.wait is None
        return same and w.pc in self._path and meet > self._path[-1] and _stores(w) == self._stores

    def count(self, w: Fragment, pc: int, number: int) -> int:
        """Count so many instructions from ``pc`` on; where it stands then."""
        counts, path = w.frame.code.counts, self._path
        times, rest = divmod(number, len(path))
        at = path.index(pc)
        for i, place in enumerate(path):
            counts[place] += w.n * (times + ((i - at) % len(path) < rest))
        return path[(at + rest) % len(path)]


def _stores(w: Fragment) -> tuple[int, int]:
    return w.cta.cluster.engine.stores, w.cta.launch.memory.stores


class Turn:
    """What is known of the loop that a fragment is in, in one of its turns."""

    def __init__(self) -> None:
        self._jump: tuple[int, int] | None = None
        self._spin: Spin | None = None
        self._before: list[Any] = []
        self._counts: list[int] = []

    def jumps(self, w: Fragment, pc: int, to: int) -> Spinning | None:
        """Back from ``pc``: whether it spins."""
        code = w.frame.code
        if self._jump != (pc, to):
            self._jump, self._before, self._spin = (pc, to), [], code.spin(to, pc)
        spin, launch = self._spin, w.cta.launch
        if (
            spin is None
            or w.frame.undefined
            or launch.watch is not None
            or launch.peers is not None
        ):
            return None
        here = [_stores(w), *(code.counts[at] for at in spin.acts)]
        here += [w.R[slot][w.sel].tobytes() for slot in spin.slots]
        before, self._before = self._before, here
        earlier, self._counts = self._counts, code.counts[to : pc + 1]
        if before != here:
            return None
        ran = [now - then for now, then in zip(self._counts, earlier, strict=True)]
        return Spinning(w, [at for at, more in enumerate(ran, to) if more])
