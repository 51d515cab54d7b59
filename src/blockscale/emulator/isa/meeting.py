"""Lanes of a warp that must all be there: shfl.sync, bar.warp.sync and others (9.7.9.6, 9.7.13).

An .aligned instruction needs the whole warp at it. One with a mask needs its lanes at *an*
instruction with the same qualifiers and the same mask, not all at the same: those who cannot go on
leave what they give to the others at a meeting, and go on once all have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..clocks.knowledge import Knowledge, joined
from ..machine.state import CTA, Fragment, Split, Step, Switch, Wait
from ..machine.undefined import Origin, has_masks
from ..machine.undefined import masks as masks_of
from ..ptx.program import Not, Register
from .registry import Form

__all__ = [
    "ACROSS", "GATHER", "Meeting", "elsewhere", "gathered", "given_undefined", "present", "rows",
    "spread",
]  # fmt: skip

ACROSS = ("vote", "match", "redux")  # the lanes get one result
GATHER = ("shfl", *ACROSS)  # the lanes give values
_ALL = np.uint32(0xFFFFFFFF)


class Meeting:
    """Lanes of one warp that execute one kind of instruction with one mask, wherever it stands."""

    __slots__ = (
        "_cta", "_mask", "key", "known", "lanes", "origin", "undefined", "values", "warp",
    )  # fmt: skip

    def __init__(self, cta: CTA, parts: tuple[str, ...], warp: int, mask: int) -> None:
        self._cta, self.warp = cta, warp
        self.key = parts, warp, mask
        self._mask = mask >> np.arange(32) & 1 == 1
        self.lanes = np.zeros(32, bool)  # who is here
        self.values: np.ndarray | None = None  # what they give to the others
        self.undefined: np.ndarray | None = None  # and masks of that
        self.origin: Origin | None = None  # of what is undefined of them
        self.known: Knowledge | None = None  # what they release

    @property
    def complete(self) -> bool:
        missing = np.nonzero(self._mask & ~self.lanes)[0] + 32 * self.warp
        return bool(self._cta.exited[missing[missing < self._cta.size]].all())

    def add(self, w: Fragment, here: np.ndarray, value: Any, slot: int | None) -> None:
        """Threads of a fragment come; ``slot`` is that of the register that they give."""
        order, lanes = self._cta.cluster.order, w.threads[here] % 32
        self.lanes[lanes] = True
        if order is not None and order.lanes > 1:
            known = order.release(w.agents()[here])
            self.known = known if self.known is None else joined(self.known, known)
        if value is None:
            return
        given = np.broadcast_to(value, w.n)
        if self.values is None:
            self.values, self.undefined = np.zeros((2, 32), given.dtype)
        self.values[lanes] = given[here]
        if slot in w.frame.undefined:
            assert self.undefined is not None
            behind = len(w.frame.function.registers)
            bits = w.R[behind + slot].view(given.dtype)[w.threads[here]]
            self.undefined[lanes] = bits
            if bits.any():
                self.origin = w.frame.undefined[slot]


def gathered(
    form: Form, mask_at: int | None, run: Step, gives: Callable[[Fragment], Any] | None = None
) -> Step:
    """``run`` once every lane named by the mask operand (None: the whole warp, here) is there.

    ``gives``: what a lane gives to the others, operand 1.
    """
    get = (lambda w: _ALL) if mask_at is None else form.get(mask_at, "b32")
    meets = mask_at is not None and not form.of_masks
    place = _Place(form, run, gives)

    def step(w: Fragment) -> Any:
        cta = w.cta
        over = place.over(w)
        if over.any():
            return place.resume(w) if over.all() else Split(over)
        masks = np.broadcast_to(get(w), w.n)
        if w.n == cta.size and w.n % 32 == 0 and (masks == _ALL).all():
            return place.leave(w)
        if not (masks >> (w.threads % 32).astype(np.uint32) & np.uint32(1)).all():
            raise form.error("a lane that executes it is not in its mask")
        missing = _missing(w, masks, [w.threads])
        if not missing.any():
            return place.leave(w)
        if not missing.all():
            return Split(missing == 0)
        if meets:
            place.enter(w, masks)
        return _wait(w, masks)

    return step


def _wait(w: Fragment, masks: np.ndarray) -> Wait:
    """For lanes of each mask: here, or where a meeting takes place."""
    cta, threads = w.cta, w.threads

    def lacking() -> np.ndarray:
        others = [f.threads for f in cta.fragments if f is not w and f.same_place(w)]
        return _missing(w, masks, [threads, *others])

    def ready() -> bool:
        return not lacking().all() or any(each.complete for each in elsewhere(w))

    def why() -> str:
        lanes = int(np.bitwise_or.reduce(lacking()))
        return f"lanes {lanes:#010x} of its mask {int(masks[0]):#010x}"

    return Wait(ready, why)


class _Place:
    """An instruction, from where lanes enter meetings and leave them."""

    def __init__(self, form: Form, run: Step, gives: Callable[[Fragment], Any] | None) -> None:
        self._parts, self._of_masks = form.parts, form.of_masks
        self._run, self._gives = run, gives
        given = form.operand(1) if gives is not None else None
        given = given.register if isinstance(given, Not) else given
        self._slot = given.slot if isinstance(given, Register) else None

    def over(self, w: Fragment) -> np.ndarray:
        """Which threads have met all others of their mask."""
        complete = {id(each) for each in elsewhere(w) if each.complete}
        if not complete:
            return np.zeros(w.n, bool)
        return np.array([id(each) in complete for each in w.cta.met[w.threads]])

    def resume(self, w: Fragment) -> Any:
        """Threads have met: they go on."""
        if self._of_masks or has_masks(w.frame) or given_undefined(w) is None:
            return self.leave(w)
        masks_of(w.frame)  # in a function that had none: once more, with care
        return Switch()

    def enter(self, w: Fragment, masks: np.ndarray) -> None:
        """Threads come, each to the meeting of its mask, if they have not."""
        new = w.cta.met[w.threads] == None  # noqa: E711 (each of an array)
        value = None if self._gives is None or not new.any() else self._gives(w)
        for warp, mask in {*zip((w.threads[new] // 32).tolist(), masks[new].tolist(), strict=True)}:
            key = self._parts, warp, mask
            meeting = w.cta.meetings.get(key)
            if meeting is None or meeting.complete:
                meeting = w.cta.meetings[key] = Meeting(w.cta, *key)
            here = new & (w.threads // 32 == warp) & (masks == mask)
            meeting.add(w, here, value, self._slot)
            w.cta.met[w.threads[here]] = meeting

    def leave(self, w: Fragment) -> Any:
        """Do it, and leave the meeting; who is the last one there ends it."""
        result, cta = self._run(w), w.cta
        if cta.meetings and not self._of_masks:
            over = elsewhere(w)
            cta.met[w.threads] = None
            for meeting in over:
                if cta.meetings.get(meeting.key) is meeting and meeting not in cta.met:
                    del cta.meetings[meeting.key]
        return result


def _missing(w: Fragment, masks: np.ndarray, here: list[np.ndarray]) -> np.ndarray:
    """For each thread of a fragment, the lanes of its mask that are neither ``here`` nor gone."""
    cta = w.cta
    present = np.ones(-(-cta.size // 32) * 32, bool)
    present[: cta.size] = cta.exited
    for threads in here:
        present[threads] = True
    lanes = (present.reshape(-1, 32) << np.arange(32, dtype=np.uint32)).sum(1).astype(np.uint32)
    return masks & ~lanes[w.threads // 32]


# --- what they give each other --------------------------------------------------------------------


def rows(w: Fragment) -> tuple[np.ndarray, np.ndarray]:
    """(row of each thread among the warps here, its lane)."""
    _, row = np.unique(w.threads // 32, return_inverse=True)
    return row, w.threads % 32


def elsewhere(w: Fragment) -> list[Meeting]:
    """Where threads of a fragment meet others that are at another instruction."""
    if not w.cta.meetings:
        return []
    return [each for each in dict.fromkeys(w.cta.met[w.threads]) if each is not None]


def given_undefined(w: Fragment) -> tuple[np.ndarray, Origin] | None:
    """Which threads of a fragment meet lanes elsewhere that give undefined bits; None: none."""
    if not w.cta.meetings:
        return None
    there = w.cta.met[w.threads]
    given = np.array([each is not None and each.origin is not None for each in there])
    return (given, there[given.argmax()].origin) if given.any() else None


def spread(w: Fragment, value: Any, form: Form) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values laid out as (warps, 32), absent lanes 0; rows and lanes of the threads."""
    row, lane = rows(w)
    value = np.broadcast_to(value, w.n)
    table = np.zeros((int(row.max()) + 1, 32), value.dtype)
    for meeting in elsewhere(w):
        given = meeting.undefined if form.of_masks else meeting.values
        assert given is not None
        table[row[w.threads // 32 == meeting.warp][0], meeting.lanes] = given[meeting.lanes]
    table[row, lane] = value
    return table, row, lane


def present(w: Fragment) -> np.ndarray:
    """Which lanes are there, (warps, 32)."""
    row, lane = rows(w)
    table = np.zeros((int(row.max()) + 1, 32), bool)
    for meeting in elsewhere(w):
        table[row[w.threads // 32 == meeting.warp][0]] |= meeting.lanes
    table[row, lane] = True
    return table
