"""How loads and stores reach each state space (PTX ISA 5.1), and generic addresses (6.4.1.1).

A generic address says by its top byte whether it is of shared memory, of local memory or, as all
others, of global memory: a space that is a *window* of generic addresses begins at one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..clocks.scopes import Strength
from ..machine.ports import (
    read_global,
    read_local,
    read_shared,
    write_global,
    write_local,
    write_shared,
)
from ..machine.state import Fragment
from ..memory.buffers import LOCAL_WINDOW, SHARED_WINDOW
from .launch import Launch

__all__ = ["SPACES", "Part", "Reader", "Space", "Writer", "by_window"]

#: (fragment or some of its threads, addresses (n,), bytes of each access) -> bytes (n, size).
Reader = Callable[[Any, np.ndarray, int], np.ndarray]
#: (fragment or some of its threads, addresses (n,), bytes (n, size)).
Writer = Callable[[Any, np.ndarray, np.ndarray], None]


class Space(NamedTuple):
    """A state space.

    Attributes:
        window: the generic address of its address 0.
        reader, writer: make the function that loads or stores, for a launch and the strength of
            the accesses, None if they are weak.
    """

    window: int
    reader: Callable[[Launch, Strength | None], Reader]
    writer: Callable[[Launch, Strength | None], Writer]


class Part:
    """Some threads of a fragment, for memory functions."""

    def __init__(self, w: Fragment, chosen: np.ndarray) -> None:
        self.cta, self.frame, self.pc, self.used = w.cta, w.frame, w.pc, w.used
        self.threads = w.threads[chosen]
        self.sel, self.n = self.threads, len(self.threads)
        self.agents, self.site = lambda: w.agents()[chosen], w.site


def by_window(where: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """Which of some generic addresses are in each window, and where that begins."""
    top = where >> np.uint64(56)
    parts = [(np.nonzero(top == value)[0], int(value) << 56) for value in np.unique(top)]
    return [(at, top if top in (SHARED_WINDOW, LOCAL_WINDOW) else 0) for at, top in parts]


def _read_shared(launch: Launch, how: Strength | None) -> Reader:
    return lambda w, where, size: read_shared(w, where, size, how)


def _write_shared(launch: Launch, how: Strength | None) -> Writer:
    return lambda w, where, values: write_shared(w, where, values, how)


def _read_global(launch: Launch, how: Strength | None) -> Reader:
    return lambda w, where, size: read_global(w, launch, where, size, how)


def _write_global(launch: Launch, how: Strength | None) -> Writer:
    return lambda w, where, values: write_global(w, launch, where, values, None, how)


def _read_constant(launch: Launch, how: Strength | None) -> Reader:
    """Nothing writes it while a kernel runs, so no check needs to know."""
    return lambda w, where, size: launch.memory.load(where, size)


def _read_generic(launch: Launch, how: Strength | None) -> Reader:
    readers = {space.window: space.reader(launch, how) for space in _WINDOWS}

    def read(w: Fragment, where: np.ndarray, size: int) -> np.ndarray:
        out = np.empty((len(where), size), np.uint8)
        for chosen, window in by_window(where):
            out[chosen] = readers[window](Part(w, chosen), where[chosen] - np.uint64(window), size)
        return out

    return read


def _write_generic(launch: Launch, how: Strength | None) -> Writer:
    writers = {space.window: space.writer(launch, how) for space in _WINDOWS}

    def write(w: Fragment, where: np.ndarray, values: np.ndarray) -> None:
        for chosen, window in by_window(where):
            at = where[chosen] - np.uint64(window)
            writers[window](Part(w, chosen), at, values[chosen])

    return write


_SHARED = Space(SHARED_WINDOW, _read_shared, _write_shared)
_LOCAL = Space(LOCAL_WINDOW, lambda launch, how: read_local, lambda launch, how: write_local)
_GLOBAL = Space(0, _read_global, _write_global)
_WINDOWS = _SHARED, _LOCAL, _GLOBAL
_CONSTANT = Space(0, _read_constant, _write_global)  # whose bounds refuse the store

#: By the name in an opcode; None: it names none, and addresses are generic.
SPACES: Mapping[str | None, Space] = {
    None: Space(0, _read_generic, _write_generic),
    "global": _GLOBAL,
    "shared": _SHARED,
    "shared::cta": _SHARED,
    "shared::cluster": _SHARED,
    "local": _LOCAL,
    "const": _CONSTANT,
    "param": _CONSTANT,
    "param::entry": _CONSTANT,
    "param::func": _CONSTANT,
}
