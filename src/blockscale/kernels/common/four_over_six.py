# mypy: ignore-errors
"""The better of two scales of a block: ``scaling.least_error``."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Uint32, cute

from . import ptx
from .arithmetic import add, multiply, tree_sum
from .e2m1_values import e2m1_values
from .encode import Encoder

__all__ = ["better_scale", "is_other_better"]


def better_scale(encoder: Encoder, magnitudes: list, amax, encode_scales: list, table) -> tuple:
    """``Encoder.scale`` of a block by that of two ``encode_scales`` whose squared error is smaller,
    the first if they are alike."""
    found = [encoder.scale(amax, each, table) for each in encode_scales]
    other = is_other_better(encoder, magnitudes, found)
    return tuple(
        Uint32(cutlass.select_(other, *each)) for each in zip(*reversed(found), strict=True)
    )


def is_other_better(encoder: Encoder, magnitudes: list, found: list, distances: tuple = ()):
    """Whether the second of two scales and reciprocals has the smaller squared error, of a lane's
    ``magnitudes`` and of those that lanes at ``distances`` have of the same block."""
    first, other = (_error(encoder, magnitudes, each, distances) for each in found)
    return other < first


def _error(encoder: Encoder, magnitudes: list, scale: tuple, distances: tuple):
    """Return the squared error of a block's elements, as multiples of the global scale."""
    (code, reciprocal), blackwell = scale, encoder.blackwell
    factors = [reciprocal.bitcast(Float32)] * len(magnitudes)
    scaled = multiply(magnitudes, factors, blackwell)
    minus = [-each for each in e2m1_values(scaled, blackwell)]
    lost = add(scaled, minus, blackwell)
    total = tree_sum(multiply(lost, lost, blackwell), blackwell)
    for distance in distances:
        total = ptx.add(total, cute.arch.shuffle_sync_bfly(total, distance))
    value = ptx.e4m3_value(code & 0x7F)
    return ptx.multiply(ptx.multiply(total, value), value)
