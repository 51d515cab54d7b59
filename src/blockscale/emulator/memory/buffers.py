"""State spaces: global buffers, the shared memory of a CTA, local memory, generic addresses.

Everything is bytes. A load gathers one item a thread, a store scatters one; both check bounds.
Shared addresses are those of shared::cluster, ``rank << 24 | offset``, as on the hardware: a CTA's
own addresses carry its rank.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ..ptx.program import PtxError

__all__ = [
    "LOCAL_WINDOW",
    "RANK_SHIFT",
    "SHARED_WINDOW",
    "SYSTEM_SHARED",
    "Buffer",
    "GlobalMemory",
    "MemoryFault",
    "gather",
    "scatter",
]

SHARED_WINDOW = 0x0100_0000_0000_0000  # generic addresses of shared memory start here
LOCAL_WINDOW = 0x0200_0000_0000_0000
RANK_SHIFT = 24
SYSTEM_SHARED = 1024  # bytes at the start of shared memory that belong to the system since sm_90


class MemoryFault(PtxError):
    """An access that the hardware would answer with an error: out of bounds, misaligned."""


def gather(memory: np.ndarray, offsets: np.ndarray, size: int) -> np.ndarray:
    """(n, size) bytes at ``offsets`` of a flat byte array; bounds were checked."""
    return _windows(memory, size)[offsets].view(np.uint8).reshape(-1, size)


def scatter(memory: np.ndarray, offsets: np.ndarray, values: np.ndarray) -> None:
    """Write (n, size) bytes; where two threads hit one place the higher one wins."""
    size = values.shape[1]
    _windows(memory, size)[offsets] = np.ascontiguousarray(values).view(f"V{size}")[:, 0]


def _windows(memory: np.ndarray, size: int) -> np.ndarray:
    """Every ``size`` bytes of a flat byte array as one item: they overlap."""
    return np.ndarray((len(memory) - size + 1,), f"V{size}", memory, strides=(1,))


Range = tuple[int, int]  # addresses, the second one is past the end


@dataclass(slots=True, eq=False)
class Buffer:
    """A piece of global memory, ``data`` (flat bytes) at ``base``."""

    name: str
    base: int
    data: np.ndarray
    writable: bool = True
    parts: tuple[Buffer, ...] = ()  # keeps alive what ``data`` looks at
    closed: tuple[Range, ...] = ()  # what of a writable one is read-only
    #: Raises MemoryFault unless so many bytes are there at each address, of a heap.
    check: Callable[[np.ndarray, int], None] | None = None

    @property
    def end(self) -> int:
        return self.base + len(self.data)

    def open(self) -> list[Range]:
        """What of it may be written."""
        return _without([(self.base, self.end)], self.closed) if self.writable else []

    def refuses(self, address: int, size: int) -> bool:
        """Whether bytes of it may not be written."""
        closed = any(low < address + size and address < high for low, high in self.closed)
        return not self.writable or closed


def _without(ranges: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    left = list(ranges)
    for low, high in others:
        parts = [((a, min(b, low)), (max(a, high), b)) for a, b in left]
        left = [(a, b) for pair in parts for a, b in pair if a < b]
    return left


def _union(a: Buffer, b: Buffer) -> Buffer:
    """Both; what one of them may write may be written, for a GPU's pointers know of no more."""
    base, end = min(a.base, b.base), max(a.end, b.end)
    closed = _without([(base, end)], [*a.open(), *b.open()])
    writable = closed != [(base, end)]
    if (base, end) == (a.base, a.end) and a.writable == writable:
        data: np.ndarray = a.data
    else:
        data = np.ctypeslib.as_array((ctypes.c_uint8 * (end - base)).from_address(base))
    name = a.name if a.name == b.name else f"{a.name} and {b.name}"
    return Buffer(name, base, data, writable, (a, b), tuple(closed) if writable else ())


_NULL = 4096  # bytes from 0 that a null pointer may reach, and beside a buffer a wrong index


class GlobalMemory:
    """Buffers at their own addresses; anything between them is out of bounds."""

    def __init__(self) -> None:
        #: How often a store changed something, while somebody wants to know.
        self.changes: int | None = None
        self.stores = 0  # but for atomics that changed nothing
        self._bases: list[int] = []
        self._buffers: list[Buffer] = []

    def add(self, buffer: Buffer) -> Buffer:
        for other in self._buffers:  # arguments may be views of one array
            if buffer.base < other.end and other.base < buffer.end:
                self._remove(other)
                return self.add(_union(other, buffer))
        at = bisect_right(self._bases, buffer.base)
        self._bases.insert(at, buffer.base)
        self._buffers.insert(at, buffer)
        return buffer

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self._buffers)

    def _remove(self, buffer: Buffer) -> None:
        at = self._buffers.index(buffer)
        del self._buffers[at], self._bases[at]

    def find(self, address: int, size: int = 1) -> Buffer:
        """The buffer that holds ``size`` bytes at ``address``; MemoryFault if none does."""
        at = bisect_right(self._bases, address) - 1
        if at >= 0 and address + size <= self._buffers[at].end:
            return self._buffers[at]
        raise MemoryFault(self._explain(address, size, at))

    def _explain(self, address: int, size: int, at: int) -> str:
        near = [
            f"{b.name} is {b.base:#x} to {b.end:#x}" for b in self._buffers[max(at, 0) : at + 2]
        ]
        nearest = "; ".join(near) or "there are no buffers"
        if address < _NULL:
            nearest = "a null pointer"
        elif not any(b.base - _NULL < address < b.end + _NULL for b in self._buffers):
            nearest += "; memory behind a pointer that is no argument is named in buffers="
        return f"global address {address:#x} (+{size}) is out of bounds: {nearest}"

    def each(self, addresses: np.ndarray, size: int) -> list[tuple[Buffer, np.ndarray | slice]]:
        if len(addresses) == 1:
            low = high = int(addresses[0])
        else:
            low, high = int(addresses.min()), int(addresses.max())
        at = bisect_right(self._bases, low) - 1
        if at >= 0 and high + size <= self._buffers[at].end:
            return [(self._buffers[at], slice(None))]
        owner = np.searchsorted(np.array(self._bases, np.uint64), addresses, side="right") - 1
        pieces: list[tuple[Buffer, np.ndarray | slice]] = []
        for index in np.unique(owner):
            threads = np.nonzero(owner == index)[0]
            for address in (addresses[threads].min(), addresses[threads].max()):
                buffer = self.find(int(address), size)
            pieces.append((buffer, threads))
        return pieces

    def holds(self, addresses: np.ndarray, size: int, to_write: bool = False) -> np.ndarray:
        """At which of the addresses (n,) there are ``size`` bytes, that may be written."""
        held = np.zeros(len(addresses), bool)
        for i, address in enumerate(addresses.tolist()):
            try:
                buffer = self.find(address, size)
                if buffer.check is not None:
                    buffer.check(addresses[i : i + 1], size)
                held[i] = not (to_write and buffer.refuses(address, size))
            except MemoryFault:
                continue
        return held

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        pieces = self.each(addresses, size)
        if len(pieces) == 1:
            (buffer, _), *_ = pieces
            if buffer.check is not None:
                buffer.check(addresses, size)
            offsets = (addresses - np.uint64(buffer.base)).astype(np.int64)
            return gather(buffer.data, offsets, size)
        out = np.empty((len(addresses), size), np.uint8)
        for buffer, threads in pieces:
            if buffer.check is not None:
                buffer.check(addresses[threads], size)
            offsets = (addresses[threads] - np.uint64(buffer.base)).astype(np.int64)
            out[threads] = gather(buffer.data, offsets, size)
        return out

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        for buffer, threads in self.each(addresses, values.shape[1]):
            refused = not buffer.writable
            if buffer.check is not None:
                buffer.check(addresses[threads], values.shape[1])
            if buffer.closed:
                size = values.shape[1]
                refused = any(buffer.refuses(at, size) for at in addresses[threads].tolist())
            if refused:
                raise MemoryFault(f"store to {buffer.name}, which is read-only")
            offsets = (addresses[threads] - np.uint64(buffer.base)).astype(np.int64)
            if self.changes is not None:
                old = gather(buffer.data, offsets, values.shape[1])
                self.changes += bool((old != values[threads]).any())
            scatter(buffer.data, offsets, values[threads])
        self.stores += 1
