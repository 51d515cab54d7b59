"""What to compile to look at a quantized matrix, and what the kernel writes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

__all__ = [
    "CODE_COUNT",
    "COUNTED",
    "LANE",
    "OCTAVE_COUNT",
    "THREADS",
    "WatchConfig",
    "Word",
    "ctas_of",
    "row_words",
]

THREADS = 256  # of a CTA
CODE_COUNT, OCTAVE_COUNT = 256, 24
LANE = 4  # elements of a lane, where blocks are compared
_ROUNDS = 16  # of a thread, over scales or 16 bytes of elements


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """A kernel: all that its code depends on.

    Attributes:
        dtype: of what was quantized; None where nobody has it.
        layout: of the scales.
        axis: that blocks run along, in what was quantized.
        turned: data lies column by column.
    """

    arch: str
    format: str
    dtype: np.dtype | None
    layout: str
    axis: int
    turned: bool
    has_global_scale: bool


class Word(IntEnum):
    """Where what is written lies in a row of words of 32 bits, which is zeros before.

    Attributes:
        CODES: how often each code of a scale occurs: its byte, of fp32 the exponent.
        OCTAVES: of picked blocks, how often each power of two lies between an element and the
            largest of its block; the last with all that are further apart.
        COMPARED, ZEROS, VANISHED, SATURATED: elements of these that are compared, that are 0, that
            became 0, and that are beyond what their block can hold.
        FIRST: the number of the first block that is not finite, from 1 on, counted as compact
            scales lie; 0 if all are.
        AMAX: the largest magnitude of all elements, as fp32; NaN where one is.
        ARRIVED: CTAs that are done.
        ELEMENT: of the first block that is not finite, the number of the first such element, from
            1 on, line by line; 0 if all are.
        VALUE: that element, as fp32.
        GLOBAL_SCALE: as fp32.
        SIGNAL, NOISE: sums of squares of elements compared and of their errors, as fp64.
        PICKS: the same two of each picked block, from here on.
    """

    CODES = 0
    OCTAVES = CODE_COUNT
    COMPARED = OCTAVES + OCTAVE_COUNT
    ZEROS = COMPARED + 1
    VANISHED = COMPARED + 2
    SATURATED = COMPARED + 3
    FIRST = COMPARED + 4
    AMAX = COMPARED + 5
    ARRIVED = COMPARED + 6
    ELEMENT = COMPARED + 7
    VALUE = COMPARED + 8
    GLOBAL_SCALE = COMPARED + 9
    SIGNAL = COMPARED + 12
    NOISE = SIGNAL + 2
    PICKS = SIGNAL + 4


#: Words that are counted in shared memory first.
COUNTED = int(Word.FIRST)


def row_words(picks: int) -> int:
    """Of a row of so many picked blocks."""
    return int(Word.PICKS) + 4 * picks


def ctas_of(scales: int, nbytes: int, multiprocessors: int) -> int:
    """CTAs of a launch that counts so many scales, and reads so much of what they are of."""
    rounds = max(scales, nbytes // 16) // THREADS
    return min(max(1, rounds // _ROUNDS), 4 * multiprocessors)
