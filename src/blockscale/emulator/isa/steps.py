"""What is put around the steps of instructions: predicates, and atomicity."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..machine.state import Fragment, Split, Step
from ..ptx.program import Instruction

__all__ = ["predicated", "synchronized"]


def synchronized(step: Step, parts: tuple[str, ...]) -> Step:
    """The step of an opcode with what atomicity asks of it: turns with other worker processes."""
    if parts[0] not in ("atom", "red") or parts[:2] == ("red", "async"):  # that acts later
        return step

    def run(w: Fragment) -> Any:
        with w.cta.launch.lock:
            return step(w)

    return run


def predicated(step: Step, ins: Instruction, control: bool) -> Step:
    """The step for those threads whose predicate holds.

    ``control``: the step may return something, and needs a whole fragment.
    """
    if ins.predicate is None:
        return step
    slot, negated = ins.predicate.slot, ins.negated

    def run(w: Fragment) -> Any:
        mask = w.R[slot][w.sel]
        if negated:
            mask = ~mask
        held = int(np.count_nonzero(mask))
        if held == w.n:
            return step(w)
        if not held:
            return None
        if control:
            return Split(mask, skip=True)
        threads, sel, n = w.threads, w.sel, w.n
        w.threads = threads[mask]
        w.sel, w.n = w.threads, held
        try:
            return step(w)
        finally:
            w.threads, w.sel, w.n = threads, sel, n

    return run
