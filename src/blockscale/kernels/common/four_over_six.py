# mypy: ignore-errors
"""The better of two scales of a block: ``reference.scaling.four_over_six``."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Uint32

from . import ptx
from .arithmetic import add, multiply, tree_sum
from .e2m1_values import e2m1_values
from .encode import Encoder

__all__ = ["better_scale"]


def better_scale(encoder: Encoder, magnitudes: list, amax, encode_scales: list, table) -> tuple:
    """``Encoder.scale`` of a block by that of two ``encode_scales`` whose squared error is smaller,
    the first if they are alike."""
    found = [encoder.scale(amax, each, table) for each in encode_scales]
    first, other = (_error(encoder, magnitudes, *each) for each in found)
    better = other < first
    return tuple(
        Uint32(cutlass.select_(better, *each)) for each in zip(*reversed(found), strict=True)
    )


def _error(encoder: Encoder, magnitudes: list, code, reciprocal):
    """Of a block's elements as multiples of the global scale."""
    factors, blackwell = [reciprocal.bitcast(Float32)] * len(magnitudes), encoder.blackwell
    scaled = multiply(magnitudes, factors, blackwell)
    minus = [-each for each in e2m1_values(scaled, blackwell)]
    lost = add(scaled, minus, blackwell)
    total = tree_sum(multiply(lost, lost, blackwell), blackwell)
    value = ptx.e4m3_value(code & 0x7F)
    return ptx.multiply(ptx.multiply(total, value), value)
