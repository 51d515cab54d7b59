"""What to compile to look at a quantized matrix, and what the kernel writes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ..common import watch_vector

__all__ = [
    "COUNTED",
    "LANE",
    "THREADS",
    "Shared",
    "WatchConfig",
    "Word",
    "ctas_of",
    "row_words",
]

THREADS = 256  # of a CTA
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
        COMPARED, ZEROS, QUANTIZED_ZEROS, SATURATED: elements of these that are compared, that are
            0, whose quantized value is 0, and that are beyond what their block can hold.
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
    OCTAVES = watch_vector.CODES
    COMPARED = OCTAVES + watch_vector.OCTAVES
    ZEROS = COMPARED + 1
    QUANTIZED_ZEROS = COMPARED + 2
    SATURATED = COMPARED + 3
    FIRST = COMPARED + 4
    AMAX = COMPARED + 5
    ARRIVED = COMPARED + 6
    ELEMENT = COMPARED + 7
    VALUE = COMPARED + 8
    GLOBAL_SCALE = COMPARED + 9
    SIGNAL = COMPARED + 12  # doubles lie at even words, pairs of them at multiples of four
    NOISE = SIGNAL + 2
    PICKS = SIGNAL + 4


assert Word.SIGNAL % 4 == Word.PICKS % 4 == 0

#: Words that are counted in shared memory first.
COUNTED = int(Word.FIRST)


class Shared(IntEnum):
    """Words of shared memory beside those that are counted, in bytes from their beginning, zeros
    before: the largest magnitude; CTAs that were done before this one; and of what is not finite
    the first element and the first block, as a largest number less theirs, as a maximum finds it.
    """

    AMAX = 0
    ARRIVED = 4
    ELEMENT = 8
    BLOCK = 12
    NBYTES = 16


def row_words(picks: int) -> int:
    """Of a row of so many picked blocks."""
    return int(Word.PICKS) + 4 * picks


def ctas_of(scales: int, nbytes: int, multiprocessors: int) -> int:
    """CTAs of a launch that counts so many scales, and reads so much of what they are of."""
    rounds = max(scales, nbytes // 16) // THREADS
    return min(max(1, rounds // _ROUNDS), 4 * multiprocessors)
