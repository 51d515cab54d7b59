"""``ErrorSums``: what the kernels and the reference count where they compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["ErrorSums"]


class ErrorSums(NamedTuple):
    """The difference between a tensor ``x`` and its dequantized values, in sums.

    Elements that are, or became, NaN or infinite are in ``nonfinite`` and in no other number.
    """

    elements: int
    signal: float  # sum of squares of x, in fp64
    noise: float  # and of the differences
    max_abs: float
    max_rel: float  # largest |difference| / |x|, x not 0
    zeros: int  # quantized to 0
    flushed: int  # and were not 0 before
    saturated: int  # beyond the largest that their block can hold, by more than a rounding
    nonfinite: int
    # How often each |difference| / |x| occurs, by the 9 bits above the second of its mantissa in
    # fp32; 0 where x is. bins[0]: no difference.
    bins: tuple[int, ...]

    @classmethod
    def total(cls, parts: Sequence[ErrorSums]) -> ErrorSums:
        """Add up what was counted of parts of a tensor."""
        by_field = {name: [getattr(each, name) for each in parts] for name in cls._fields}
        bins = tuple(map(sum, zip(*by_field.pop("bins"), strict=True)))
        worst = {name: max(by_field.pop(name)) for name in ("max_abs", "max_rel")}
        return cls(**{name: sum(each) for name, each in by_field.items()}, **worst, bins=bins)


#: A scale amax / 448 that was rounded down by one unit is no saturation.
SLACK = 1 + 2.0**-20
BINS = 512
