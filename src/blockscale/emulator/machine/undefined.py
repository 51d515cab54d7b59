"""Undefined bits: memory that nobody wrote, and whatever is made of it, until something uses it.

To read such memory is no fault: padding and lanes that are thrown away are read by everyone. What
is read is undefined, and so is what is computed from it; registers and memories have masks whose
bits say so. A fault is to *use* it: as an address, to decide a branch, as an operand of what acts,
or to store it to global memory, where somebody will read it. Masks are made when the first
undefined bit is met: until then the only cost is to look whether memory was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from ..alarms.errors import Site

if TYPE_CHECKING:
    from ..alarms.alarm import Alarms
    from .engine import Work
    from .shadow import Shadow
    from .state import Frame

__all__ = [
    "Blank", "Blanks", "Origin", "Undefined", "View", "cover", "fetched", "fill", "fill_masks",
    "gathered", "has_masks", "mark", "masks", "used",
]  # fmt: skip


class Blank(Exception):
    """A read met undefined bits, before it had any effect: it is to be done again, with masks."""


class View(Enum):
    """What reads of asynchronous work give."""

    USED = "values; undefined bits are used"
    TRIED = "values; Blank where a bit is undefined"
    KNOWN = "values; undefined bits are known"
    MASKS = "masks"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where undefined bits were read first."""

    site: Site
    message: str


@dataclass(frozen=True, slots=True)
class Undefined:
    """Masks of values, in which set bits are undefined."""

    bits: np.ndarray
    origin: Origin

    def through(self, change: Callable[[np.ndarray], np.ndarray]) -> Undefined:
        """Of values that were moved."""
        return Undefined(change(self.bits), self.origin)


def used(alarms: Alarms, site: Site, how: str, origin: Origin) -> None:
    """An undefined value is used; ``how`` is a verb with {} for the value."""
    if site == origin.site:
        message = f"{origin.message}, and {how.format('that')}"
        alarms.tell("uninitialized", message, site)
    else:
        message = f"{site} {how.format('an undefined value')}: {origin.message}"
        alarms.tell("uninitialized", message, site, origin.site)


# --- memory ---------------------------------------------------------------------------------------


class Blanks:
    """Which bits of a memory are undefined: those that nobody wrote, and those written so.

    Args:
        shadow: knows which cells were written.
        items: bytes or words of the memory; each has a mask.
        dtype: of a mask.
    """

    def __init__(self, shadow: Shadow, items: int, dtype: type[np.unsignedinteger]) -> None:
        self._shadow, self._items = shadow, items
        self._dtype = np.dtype(dtype)
        self._bits: np.ndarray | None = None
        self._origins = np.empty(0, object)

    def has(self, cells: np.ndarray, items: Callable[[], np.ndarray]) -> bool:
        """Whether any of the cells, which are those items, has undefined bits."""
        if not self._shadow.written[cells].all() and self._shadow.unwritten(cells).any():
            return True
        return self._bits is not None and bool(self._bits[items()].any())

    def masks(self, items: np.ndarray, site: Site) -> Undefined:
        """Of items of which some are undefined, read at ``site``."""
        blank = self._shadow.unwritten(self._shadow.cells_of(items))
        bits = np.where(blank, np.invert(self._dtype.type(0)), self._dtype.type(0))
        if self._bits is not None:
            bits |= self._bits[items]
        first = np.flatnonzero(bits)[:1]
        if not len(first) or blank.flat[first[0]]:
            item = items.flat[first[0]] if len(first) else items.flat[0]
            place = self._shadow.cell_name(int(self._shadow.cells_of(item)))
            place = self._shadow.name.format(place)
            return Undefined(bits, Origin(site, f"{site} reads {place}, which nobody has written"))
        return Undefined(bits, self._origins[items.flat[first[0]]])

    def write(self, items: Callable[[], np.ndarray], found: Undefined | None) -> None:
        """Items are written, with what is undefined of their new values."""
        if found is None and self._bits is None:
            return
        if self._bits is None:
            self._bits = np.zeros(self._items, self._dtype)
            self._origins = np.empty(self._items, object)
        at = items()
        self._bits[at] = 0 if found is None else found.bits
        if found is not None:
            self._origins[at] = found.origin


def fetched(work: Work, read: Callable[[], np.ndarray]) -> tuple[np.ndarray, Undefined | None]:
    """What ``read`` gives to a work, and what of it is undefined.

    ``read`` only reads and moves bits: it is done again for the masks.
    """
    work.view = View.TRIED
    try:
        return read(), None
    except Blank:
        work.view = View.MASKS
        bits = read()
        work.view = View.KNOWN
        assert work.origin is not None
        return read(), Undefined(bits, work.origin)
    finally:
        work.view = View.USED


# --- registers ------------------------------------------------------------------------------------


def has_masks(frame: Frame) -> bool:
    return len(frame.registers) > len(frame.function.registers)


def masks(frame: Frame) -> int:
    """How far the masks of the registers of a frame are behind these; made when first needed."""
    registers, behind = frame.registers, len(frame.function.registers)
    if not has_masks(frame):
        registers += [np.zeros(len(r), r.dtype) for r in registers]
        frame.code.be_careful()
    return behind


def mark(frame: Frame, slots: Iterable[int], origin: Origin | None) -> None:
    """Look again which registers have undefined bits, after their masks were changed.

    Args:
        origin: of the bits of those that had none.
    """
    behind = len(frame.function.registers)
    for slot in slots:
        if not frame.registers[behind + slot].view(np.uint8).any():
            frame.undefined.pop(slot, None)
        elif slot not in frame.undefined:
            assert origin is not None
            frame.undefined[slot] = origin


def cover(frame: Frame, slot: int, threads: np.ndarray, whole: bool) -> None:
    """All bits, or none, of a register are undefined in these threads."""
    mask = frame.registers[masks(frame) + slot]
    if mask.dtype == np.bool_:
        mask[threads] = whole
    else:
        mask.view(np.uint8).reshape(len(mask), -1)[threads] = 0xFF if whole else 0


def fill(
    frame: Frame, slots: tuple[int, ...], threads: Any, words: np.ndarray, found: Undefined | None
) -> None:
    """Asynchronous work writes (threads, registers) words, of which bits may be undefined."""
    for i, slot in enumerate(slots):
        frame.registers[slot].view(np.uint32)[threads] = words[:, i]
    fill_masks(frame, slots, threads, found)


def fill_masks(frame: Frame, slots: Iterable[int], threads: Any, found: Undefined | None) -> None:
    """What is undefined of registers of one size that were written in these threads."""
    slots = tuple(slots)
    if found is None and frame.undefined.keys().isdisjoint(slots):
        return
    behind = masks(frame)
    for i, slot in enumerate(slots):
        bits = 0 if found is None else found.bits[:, i]
        _bits_of(frame.registers[behind + slot])[threads] = bits
    mark(frame, slots, None if found is None else found.origin)


def _bits_of(register: np.ndarray) -> np.ndarray:
    return register.view(f"u{register.itemsize}")


def gathered(frame: Frame, slots: Iterable[int | None], threads: Any) -> Undefined | None:
    """Masks (threads, registers) of registers of one size; slot None: of something else."""
    slots = list(slots)
    if not frame.undefined or frame.undefined.keys().isdisjoint(slots):
        return None
    behind = masks(frame)
    number = len(frame.registers[0][threads])
    rows = {
        i: _bits_of(frame.registers[behind + slot])
        for i, slot in enumerate(slots)
        if slot is not None
    }
    bits = np.zeros((number, len(slots)), next(iter(rows.values())).dtype)
    for i, row in rows.items():
        bits[:, i] = row[threads]
    if not bits.any():
        return None
    return Undefined(bits, next(frame.undefined[s] for s in slots if s in frame.undefined))
