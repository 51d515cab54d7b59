# mypy: ignore-errors
"""Random bits of the elements of a matrix, for stochastic rounding.

One call of Philox gives four elements that follow each other. Where rows begin with a whole call,
"by fours", lanes use all four: a lane that has 16 columns of a row makes four calls for them, and
two lanes that have two columns each share a call (:meth:`Noise.of_pairs`). Else every element makes
a call of its own: that is right for any row, and slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, Int64, Uint32, cute, select_

from ..common import ptx
from ..common.philox import philox

__all__ = ["Noise", "step_words"]


@dataclass(frozen=True)
class Noise:
    """The bits of ``seed.Numbers``.

    Attributes:
        first, row: the index of the matrix's first element, and how many a row is after the last.
        key, step: words.
        fours: ``first`` and ``row`` are multiples of four.
    """

    first: Any
    row: Any
    key: list
    step: list
    fours: bool

    @classmethod
    def of(cls, numbers, matrix, fours: bool) -> Noise:
        """Of what a launch is given: the step, in memory of the device, so that replays of a graph
        differ; value, first, row and matrix, how many a matrix is after the last."""
        step, value, first, row, apart = numbers
        if matrix is not None:
            first = first + Int64(matrix) * apart
        key = [Uint32(value), Uint32(value >> 32)]
        return cls(first, row, key, step_words(step), fours)

    def of_row(self, row, column, order=None) -> list:
        """Of 16 elements of a row, from ``column`` on, in the lane's ``order``: the i-th is that of
        element i XOR ``order``."""
        start = self._index(row, column)
        if self.fours:
            starts = [start + _at(i, order) for i in range(0, 16, 4)]
            return [word for each in starts for word in self._four(each)]
        return [self._one(start + _at(i, order)) for i in range(16)]

    def of_element(self, row, column):
        """Of one element of a row, whose ``column`` is a multiple of four."""
        index = self._index(row, column)
        return self._four(index)[0] if self.fours else self._one(index)

    def of_pair(self, row, column) -> list:
        """Of two elements of a row. Lanes side by side have columns side by side."""
        index = self._index(row, column)
        if not self.fours:
            return [self._one(index + i) for i in range(2)]
        words, odd = self._four(index), cute.arch.lane_idx() % 2 == 1
        return [Uint32(select_(odd, words[i + 2], words[i])) for i in range(2)]

    def of_pairs(self, row, column, count: int) -> list:
        """Of two columns of ``count`` rows, an even number: a pair of each row. Lanes side by side
        have columns side by side.

        Two lanes make the calls of two rows, a row each, and then exchange halves.
        """
        if not self.fours:
            starts = [self._index(row + i, column) for i in range(count)]
            return [[self._one(start + j) for j in range(2)] for start in starts]
        found, turn = [], cute.arch.lane_idx() % 2
        odd = turn == 1
        for i in range(0, count, 2):
            words = self._four(self._index(row + i + turn, column))
            kept = [Uint32(select_(odd, words[j + 2], words[j])) for j in range(2)]
            sent = [Uint32(select_(odd, words[j], words[j + 2])) for j in range(2)]
            got = [cute.arch.shuffle_sync_bfly(word, 1) for word in sent]
            pairs = list(zip(got, kept, strict=True))
            found.append([Uint32(select_(odd, *pair)) for pair in pairs])
            found.append([Uint32(select_(odd, *pair[::-1])) for pair in pairs])
        return found

    def _index(self, row, column):
        return self.first + Int64(row) * self.row + column

    def _four(self, index) -> list:
        """Of four elements, the call of which the one at ``index`` belongs to."""
        call = index >> 2
        return philox([Uint32(call), Uint32(call >> 32), *self.step], self.key)

    def _one(self, index):
        words, place = self._four(index), Int32(index) & 3
        low, high = (Uint32(select_(place % 2 == 1, *words[i : i + 2][::-1])) for i in (0, 2))
        return Uint32(select_(place >= 2, high, low))


def step_words(step) -> list:
    """The words of a step in memory of the device."""
    return [ptx.load_global(step.iterator.toint() + i, 4) for i in (0, 4)]


def _at(i: int, order):
    return i if order is None else Int32(order ^ i)
