"""What to compile to look at a quantized matrix, and what the kernel writes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ...formats import Format

__all__ = ["CODE_COUNT", "THREADS", "Row", "WatchConfig", "Word", "ctas_of"]

THREADS = 256  # of a CTA
CODE_COUNT = 256
_ROUNDS = 16  # of a thread, over scales or 16 bytes of elements


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """A kernel: all that its code depends on.

    Attributes:
        dtype: of what was quantized; None where nobody has it.
        layout: of the scales.
        axis: of the contraction in the tensor whose compact scales are given.
    """

    arch: str
    format: str
    dtype: np.dtype | None
    layout: str
    axis: int
    has_global_scale: bool


class Word(IntEnum):
    """Where a row's single words of 32 bits lie. A row is zeros before.

    Attributes:
        CODES: how often each code of a scale occurs: its byte, of fp32 the exponent.
        FIRST: the number of the first block that is not finite, from 1 on, counted as compact
            scales lie; 0 if all are.
        AMAX: the largest magnitude, as fp32; NaN where one is.
        ARRIVED: CTAs that are done.
        ELEMENT: of that block, the number of the first element that is not finite, from 1 on,
            line by line; 0 if all are.
        VALUE: that element, as fp32.
        GLOBAL_SCALE: as fp32.
        PICKS: those of picked blocks begin here.
    """

    CODES = 0
    FIRST = CODE_COUNT
    AMAX = CODE_COUNT + 1
    ARRIVED = CODE_COUNT + 2
    ELEMENT = CODE_COUNT + 3
    VALUE = CODE_COUNT + 4
    GLOBAL_SCALE = CODE_COUNT + 5
    PICKS = CODE_COUNT + 8


@dataclass(frozen=True, slots=True)
class Row:
    """Where words of so many picked blocks lie: ``x``, their elements as fp32; ``scale``, as they
    are stored, a word each; ``data``, bytes of their elements."""

    picks: int
    size: int
    stored: int

    @classmethod
    def of(cls, format: Format, picks: int) -> Row:
        """Of blocks of a line of this format."""
        size = format.block_size
        return cls(picks, size, format.element.stored(size))

    @property
    def x(self) -> int:
        return int(Word.PICKS)

    @property
    def scale(self) -> int:
        return self.x + self.picks * self.size

    @property
    def data(self) -> int:
        return self.scale + self.picks

    @property
    def words(self) -> int:
        """Of the whole row, a multiple of 4."""
        return -(-(self.data * 4 + self.picks * self.stored) // 16) * 4


def ctas_of(scales: int, nbytes: int, multiprocessors: int) -> int:
    """CTAs of a launch that counts so many scales, and reads so much of what they are of."""
    rounds = max(scales, nbytes // 16) // THREADS
    return min(max(1, rounds // _ROUNDS), 4 * multiprocessors)
