# mypy: ignore-errors
"""Scales of transformed blocks, corrected and rounded stochastically: ``scaling.ms_eden``."""

from __future__ import annotations

import cutlass
from cutlass import Float32, cute

from ...formats import get_format
from . import ptx
from .arithmetic import multiply, tree_sum
from .e2m1_values import e2m1_values
from .encode import Encoder
from .spec import specify
from .stochastic import stochastic_code

__all__ = ["corrected_scales"]

_E4M3 = specify(get_format("mxfp8"), "rceil", "propagate")


def corrected_scales(
    encoder: Encoder, blocks: list, encode_scale, table, noise: list, distances: tuple
) -> list:
    """``Encoder.scale`` of each of a lane's ``blocks`` of words, which were transformed together
    with those of lanes at ``distances``; all lanes of a warp meet in here.

    ``noise``: random bits, for each block. The reciprocal is that of the scale before.
    """
    scales, sums = [], []
    for words in blocks:
        finite = [encoder.finite(word) for word in words]
        scales.append(encoder.scale(cutlass.max(*finite), encode_scale, table))
        sums.append(_sums(encoder, finite, scales[-1][1]))
    squares, along = (tree_sum(list(each)) for each in zip(*sums, strict=True))
    for distance in distances:
        squares, along = (
            ptx.add(each, cute.arch.shuffle_sync_bfly(each, distance)) for each in (squares, along)
        )
    factor = cutlass.select_(along > Float32(0.0), ptx.divide(squares, along), Float32(1.0))
    found = []
    for words, (code, reciprocal), bits in zip(blocks, scales, noise, strict=True):
        value = ptx.multiply(ptx.e4m3_value(code), Float32(factor))
        amax = encoder.amax(encoder.states(words))
        found.append((encoder.marked(stochastic_code(value, bits, _E4M3), amax), reciprocal))
    return found


def _sums(encoder: Encoder, finite: list, reciprocal) -> tuple:
    """Of squares of a block's elements, and of products with what they become."""
    blackwell, factor = encoder.blackwell, reciprocal.bitcast(Float32)
    given = [each.bitcast(Float32) for each in finite]
    given = multiply(given, [factor] * len(given), blackwell)
    made = e2m1_values(given, blackwell)
    return tuple(tree_sum(multiply(given, each, blackwell), blackwell) for each in (given, made))
