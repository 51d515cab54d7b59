"""Accesses of warps as memory sees them: sectors of global memory, banks of shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..memory.buffers import GlobalMemory
from .report import SECTOR, Place

__all__ = ["Batch", "sectors", "settled", "transfer_sectors", "wavefronts"]

_ENOUGH = 1 << 14  # threads whose accesses are looked at together
_NOBODY = -1  # the address of a lane that does nothing


def sectors(table: np.ndarray, size: int) -> np.ndarray:
    """Bytes asked for, sectors touched, and the fewest sectors that would hold as many bytes.

    Args:
        table: (requests, 32) addresses of the lanes, -1 for none; each a multiple of ``size``.
        size: bytes of a lane, at most 32.
    """
    ordered = np.sort(table, axis=1)
    asked = size * _new(ordered).sum(1)
    return np.array([asked.sum(), _new(ordered // SECTOR).sum(), (-(-asked // SECTOR)).sum()])


def wavefronts(table: np.ndarray, size: int) -> np.ndarray:
    """Times that the banks of shared memory are used, and how many of them conflicts cost.

    Each of the 32 banks serves one word of 4 bytes at a time, which several lanes may want. 16
    lanes of 8 bytes or 8 of 16 go together. Arguments as for ``sectors``; at most 16 bytes.
    """
    words = np.arange(max(size // 4, 1))
    each = np.where(table[..., None] < 0, _NOBODY, table[..., None] // 4 + words)
    ordered = np.sort(each.reshape(-1, 32), axis=1)
    banks = (ordered & 31) + 32 * np.arange(len(ordered))[:, None]
    counts = np.bincount(banks[_new(ordered)], minlength=banks.size)
    times = counts.reshape(-1, 32).max(1)
    return np.array([times.sum(), (times - (times > 0)).sum()])


def transfer_sectors(where: np.ndarray, size: int) -> np.ndarray:
    """As ``sectors``, of one transfer made of pieces of ``size`` bytes at any addresses."""
    asked = size * len(where)
    first, last = where // SECTOR, (where + size - 1) // SECTOR
    reach = np.arange(int((last - first).max()) + 1)
    touched = np.unique(np.minimum(first[:, None] + reach, last[:, None]))
    return np.array([asked, touched.size, -(-asked // SECTOR)])


def settled(where: np.ndarray, memory: GlobalMemory) -> np.ndarray:
    """Addresses as int64, of buffers that begin in the second half of a sector 16 bytes lower.

    Arrays of numpy begin at multiples of 16, allocations on a GPU at multiples of 256.
    """
    out = where.astype(np.int64)
    left = np.ones(len(out), bool)
    while left.any():
        buffer = memory.find(int(where[int(left.argmax())]))
        inside = (where >= buffer.base) & (where < buffer.end)
        out[inside] -= buffer.base & 16
        left &= ~inside
    return out


def _new(ordered: np.ndarray) -> np.ndarray:
    """Where sorted rows have a number for the first time."""
    new = ordered != _NOBODY
    new[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    return np.asarray(new)


_MEASURES: Mapping[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "global": sectors,
    "shared": wavefronts,
}


class Batch:
    """Accesses of one instruction, kept until there are enough of them to look at together.

    Attributes:
        bytes: of all threads.
        requests: instructions of warps.
        sums: what ``sectors`` or ``wavefronts`` say of them.
    """

    def __init__(
        self, place: Place, space: str, kind: str, size: int, memory: GlobalMemory
    ) -> None:
        self.place, self.space, self.kind = place, space, kind
        self.bytes = self.requests = 0
        self.sums: Any = 0
        self._size, self._measure, self._memory = size, _MEASURES.get(space), memory
        self._last: object = None
        self._clear()

    def _clear(self) -> None:
        self._where: list[np.ndarray] = []
        self._who: list[np.ndarray] = []
        self._turns: list[int] = []
        self._threads = 0

    def add(self, where: np.ndarray, threads: np.ndarray, turn: object) -> None:
        """Keep an access; what has the same ``turn``, if any, is the same instruction once."""
        self.bytes += self._size * len(where)
        if self._measure is None:
            return
        same = turn is not None and turn == self._last
        if self._threads >= _ENOUGH and not same:
            self.look()
        same = same and bool(self._turns)
        self._turns.append(self._turns[-1] if same else len(self._turns))
        self._last = turn
        self._where.append(where)
        self._who.append(threads)
        self._threads += len(threads)

    def look(self) -> None:
        """Measure what was kept."""
        if self._measure is not None and self._where:
            table = self._table()
            self.requests += len(table)
            self.sums = self.sums + self._measure(table, self._size)
            self._clear()

    def _table(self) -> np.ndarray:
        """(requests, 32) addresses: a row for each warp of each access."""
        threads = np.concatenate(self._who)
        lengths = [len(who) for who in self._who]
        warps = np.repeat(np.array(self._turns) * 32, lengths) + (threads >> 5)
        steps = np.diff(warps)
        if (steps < 0).any():  # threads took turns at one address
            row = np.unique(warps, return_inverse=True)[1]
        else:
            row = np.concatenate([[0], np.cumsum(steps != 0)])
        table = np.full((int(row.max()) + 1, 32), _NOBODY, np.int64)
        where = np.concatenate(self._where)
        table[row, threads & 31] = settled(where, self._memory) if self.space == "global" else where
        return table
