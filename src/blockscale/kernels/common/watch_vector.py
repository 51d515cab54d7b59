"""Where a vector has what a watch sees of a tensor: fp64 numbers, of a CPU's loop, of the rows that
a GPU's kernel writes, and of torch operations.

The first block and element that are not finite mean nothing where no code of a scale is NaN.
"""

from __future__ import annotations

from ...formats import FP32, Format

__all__ = [
    "AMAX",
    "CODES",
    "CODES_AT",
    "ELEMENT",
    "FIRST_BLOCK",
    "GLOBAL_SCALE",
    "LENGTH",
    "OCTAVES",
    "OCTAVES_AT",
    "SUMS",
    "SUMS_AT",
    "VALUE",
    "nan_code",
]

#: Codes of a scale: its byte, of fp32 the exponent.
CODES = 256
#: Bins of |x| over the largest of its block, an octave each, the last with all that is smaller.
OCTAVES = 24
#: Sums over the elements that are compared, in their order.
SUMS = ("compared", "signal", "noise", "zeros", "flushed", "saturated")

AMAX = 0  # the largest magnitude
FIRST_BLOCK = 1  # that is not finite: its number as compact scales lie
GLOBAL_SCALE = 2
CODES_AT = 3  # how often each code occurs
SUMS_AT = CODES_AT + CODES
OCTAVES_AT = SUMS_AT + len(SUMS)  # how often each octave occurs
ELEMENT = OCTAVES_AT + OCTAVES  # of that block, the first that is not finite
VALUE = ELEMENT + 1  # itself
LENGTH = VALUE + 1


def nan_code(format: Format) -> int:
    """The code of a scale that is NaN."""
    return 255 if format.scale is FP32 else format.scale.nan_code
