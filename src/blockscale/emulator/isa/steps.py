"""What is put around the steps of instructions: predicates, and the order of strong accesses."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..machine import Fragment, Split, Step
from ..program import Instruction

__all__ = ["is_strong", "predicated", "synchronized"]

_ACCESSES = ("ld", "ldu", "st", "red")  # an atom has turns, and looks after them itself
_STRONG = {"volatile", "relaxed", "acquire", "release", "acq_rel"}


def is_strong(parts: tuple[str, ...]) -> bool:
    """Whether an access may synchronize: atomics, and what is marked as such."""
    return parts[0] in ("atom", "red") or not _STRONG.isdisjoint(parts)


def synchronized(step: Step, parts: tuple[str, ...]) -> Step:
    """The step of an opcode, if it is an access, with what atomicity and order ask of it."""
    if parts[:2] == ("red", "async"):  # what it does, it does later
        return step
    if parts[0] in ("atom", "red"):
        step = _locked(step)
    if parts[0] in _ACCESSES and is_strong(parts):
        step = _strong(step, parts[0] not in ("ld", "ldu"))
    return step


def _locked(step: Step) -> Step:
    def run(w: Fragment) -> Any:
        with w.cta.launch.lock:
            return step(w)

    return run


def _strong(step: Step, releases: bool) -> Step:
    """Orders who makes strong accesses. All of them count as one flag, which may order more than
    the hardware does: a race can be missed, none is invented."""

    def run(w: Fragment) -> Any:
        cluster = w.cta.cluster
        if cluster.order is not None and cluster.member is None:  # who knows of places
            cluster.order.through("flags", w.agents(), releases)
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
