# mypy: ignore-errors
"""A Hadamard transform of blocks along the contraction, in fp32: ``hadamard.transformed``.

A lane has 16 elements of a row, or up to 32 of two columns. Elements further apart are another
lane's: two lanes exchange all that they have, once for each doubling of the block.
"""

from __future__ import annotations

import math

import numpy as np
from cutlass import Float32, Uint32, cute, select_

from ..common import ptx
from ..common.arithmetic import widen
from .config import ACROSS, BAND, Config
from .signs import drawn_signs

__all__ = ["Transform"]

_LANE = 16  # elements of a row that a lane has


class Transform:
    """Of blocks of ``size``; bit i of ``signs``, words, negates element i of each."""

    def __init__(self, size: int, dtype: np.dtype, signs: list):
        self.size, self.dtype, self.signs = size, dtype, signs

    @classmethod
    def of(cls, config: Config, given) -> Transform:
        """``given``: low and high 64 bits of signs, or the step and the value that draw them, for
        which all lanes of a warp meet."""
        size = config.hadamard
        if config.draws_signs:
            return cls(size, config.dtype, drawn_signs(size, *given))
        return cls(size, config.dtype, [Uint32(each >> at) for each in given for at in (0, 32)])

    def of_row(self, words: list) -> list:
        """fp32 words of 16 elements of a row; all lanes of a warp meet in here."""
        lane, lanes = cute.arch.lane_idx(), max(self.size // _LANE, 1)
        signs = self.signs[0]
        if lanes > 2:
            for i, word in enumerate(self.signs[1 : lanes // 2], 1):
                signs = Uint32(select_(lane % lanes // 2 == i, word, signs))
        if lanes > 1:
            signs = signs >> Uint32(lane % 2 * _LANE)
        values = self._in_lane(widen(words, self.dtype), signs)
        for distance in self.distances_of_rows:
            values = self._across(values, distance)
        return self._scaled(values)

    @property
    def distances_of_rows(self) -> tuple[int, ...]:
        """To the lanes that have other elements of a block of a row, the nearest first."""
        return _powers(1, self.size // _LANE)

    @property
    def distances_of_columns(self) -> tuple[int, ...]:
        """To the lanes that have other elements of a block of a column, the nearest first."""
        return _powers(ACROSS, self.size // BAND * ACROSS)

    def of_columns(self, rows: list) -> list:
        """fp32 words of each row, of ``rows`` of words: of whole blocks along columns, or of a
        band of them, of which lanes eight apart have the next. Then all lanes of a warp meet."""
        signs, bands = self.signs[0], self.size // BAND
        for i, word in enumerate(self.signs[1:bands], 1):
            signs = Uint32(select_(cute.arch.lane_idx() // ACROSS % bands == i, word, signs))
        columns = zip(*(widen(words, self.dtype) for words in rows), strict=True)
        made = [self._in_lane(list(each), signs) for each in columns]
        for distance in self.distances_of_columns:
            made = [self._across(values, distance) for values in made]
        made = [self._scaled(values) for values in made]
        return [list(row) for row in zip(*made, strict=True)]

    def _in_lane(self, values: list, signs) -> list:
        """Signs, then sums and differences of what is less than 16, or a block, apart."""
        values = [self._signed(value, signs, i % self.size) for i, value in enumerate(values)]
        apart = 1
        while apart < min(self.size, len(values)):
            pairs = [(i, i + apart) for i in range(len(values)) if not i & apart]
            found = list(values)
            for i, j in pairs:
                found[i] = ptx.add(values[i], values[j])
                found[j] = ptx.subtract(values[i], values[j])
            values, apart = found, 2 * apart
        return values

    def _signed(self, value, signs, i: int):
        return _flipped(value, (signs << (31 - i)) & Uint32(1 << 31))

    def _across(self, values: list, distance: int) -> list:
        """The sum, or the other lane's minus this one's."""
        minus = (cute.arch.lane_idx() & distance) << (31 - distance.bit_length() + 1)
        found = []
        for value in values:
            other = cute.arch.shuffle_sync_bfly(value, distance)
            found.append(ptx.add(other, _flipped(value, minus)))
        return found

    def _scaled(self, values: list) -> list:
        factor = Float32(float(np.float32(1 / math.sqrt(self.size))))
        return [ptx.multiply(value, factor).bitcast(Uint32) for value in values]


def _powers(first: int, stop: int) -> tuple[int, ...]:
    """``first``, twice as much, and so on, below ``stop``."""
    return tuple(first << i for i in range((stop // first).bit_length() - 1))


def _flipped(value, sign):
    return (value.bitcast(Uint32) ^ Uint32(sign)).bitcast(Float32)
