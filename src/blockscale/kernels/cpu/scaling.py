# mypy: ignore-errors
"""Quantize rows of NVFP4 whose blocks take the best of several scales, tile by tile.

As ``scaling.least_error``: sums of squares are of pairs side by side, then of pairs of
these. Blocks that fp32 arithmetic may get wrong (tiny ones, and those with a NaN or an infinity)
are counted only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...jit import compiled, spliced
from .arith import INF, encode, fp32
from .encoding import LARGE, SMALL, block_amax, mark_inexact, pad, spread, ue4m3_scales
from .intrinsics import as_float, shl, shr
from .packing import pack
from .spec import Geometry


class Scratch(NamedTuple):
    """Memory for what the passes over a tile leave to each other."""

    padded: np.ndarray  # items of x
    amax: np.ndarray  # int32, as the next four
    code: np.ndarray
    reciprocal: np.ndarray
    spread: np.ndarray
    best_scale: np.ndarray
    squares: np.ndarray  # fp32, as the next two
    room: np.ndarray
    best_error: np.ndarray
    inexact: np.ndarray  # uint8, as the rest
    trial: np.ndarray
    codes: np.ndarray


def make_scratch(x: np.ndarray, geometry: Geometry) -> Scratch:
    width = geometry.width
    return Scratch(
        np.empty(width if geometry.columns % geometry.block_columns else 0, x.dtype),
        *np.empty((5, width), np.int32),
        *np.empty((3, width), np.float32),
        *np.empty((3, width), np.uint8),
    )


@compiled
def _try(row, reciprocal, spec, codes, squares):
    """Codes of a row by one of its scales, and squares of what is lost, in units of the scale."""
    lowest, shift = np.int32((128 - spec.bias) << 23), np.int32(23 - spec.mantissa_bits)
    top, sign = np.int32(spec.max_bits), np.int32(1 << (spec.bits - 1))
    down = np.int32(32 - spec.bits)
    for c in range(codes.size):
        v = fp32(row[c])
        m, factor = np.int32(v & np.int32(0x7FFFFFFF)), as_float(reciprocal[c])
        code = encode(m, factor, lowest, shift, top)
        # E2M1's value by its code, from 1 on; a table would keep LLVM from vector code
        value = np.int32(shl(code, np.int32(22)) + np.int32(126 << 23))
        value = value if code > 1 else np.int32(code * np.int32(126 << 23))
        lost = np.float32(as_float(m) * factor) - as_float(value)
        squares[c] = np.float32(lost * lost)
        codes[c] = np.uint8(np.int32(code | np.int32(shr(v, down) & sign)))


@compiled
def _add_pairs(squares, sums):
    """Sums of pairs side by side."""
    for i in range(sums.size):
        sums[i] = squares[2 * i] + squares[2 * i + 1]


@compiled
def _add_blocks(squares, room, n):
    """Sums of blocks of 16, at the beginning of ``squares``."""
    _add_pairs(squares[:n], room[: n // 2])
    _add_pairs(room[: n // 2], squares[: n // 4])
    _add_pairs(squares[: n // 4], room[: n // 8])
    _add_pairs(room[: n // 8], squares[: n // 16])


@compiled
def _keep_better(is_first, code, scales, squares, trial, best_scale, best_error, codes):
    """Take over blocks that lose less than before; the first time, all."""
    size = codes.size // code.size
    for b in range(code.size):
        value = as_float(scales[code[b]])
        error = np.float32(np.float32(squares[b] * value) * value)
        if is_first or error < best_error[b]:
            best_error[b], best_scale[b] = error, code[b]
            for i in range(b * size, b * size + size):
                codes[i] = trial[i]


@spliced
def quantize_best_tiles(
    x, data, scale8, geometry, spec, factors, table, scales, scratch, first, last
):
    """Quantize tiles ``first`` to ``last`` of rows; how many inexact blocks were seen.

    ``factors``: bits of what makes a scale of an amax, of each scale that is tried, in turn; all
    else as ``encoding.quantize_tiles`` and ``comparing.compare_tiles`` have it.
    """
    g = geometry
    size, width, found = g.block_columns, g.width, 0
    scale_columns = -(-g.columns // size)
    for tile in range(first, last):
        lead, strip = tile // (g.strips * g.segments), tile // g.segments % g.strips
        left = tile % g.segments * width
        columns = min(width, g.columns - left)
        n = -(-columns // size) * size
        blocks = n // size
        start = lead * g.lead_stride + strip * g.row_stride + left
        row = x[start : start + n]
        if columns < n:
            pad((x, start, g.row_stride, 1), columns, n, scratch.padded)
            row = scratch.padded[:n]
        block_amax(row, size, scratch.amax[:blocks])
        for k in range(factors.size):
            factor = factors[k]
            ue4m3_scales(scratch.amax[:blocks], factor, table, scratch.code, scratch.reciprocal)
            small = np.int32(SMALL if factor >= SMALL else INF)
            found += mark_inexact(
                scratch.amax[:blocks], small, scratch.reciprocal, np.int32(LARGE), scratch.inexact
            )
            spread(scratch.reciprocal, size, scratch.spread[:n])
            _try(row, scratch.spread, spec, scratch.trial[:n], scratch.squares)
            _add_blocks(scratch.squares, scratch.room, n)
            _keep_better(
                k == 0, scratch.code[:blocks], scales, scratch.squares, scratch.trial,
                scratch.best_scale, scratch.best_error, scratch.codes[:n],
            )  # fmt: skip
        at = (lead * g.strips + strip) * scale_columns + left // size
        for b in range(blocks):
            scale8[at + b] = np.uint8(scratch.best_scale[b])
        at = ((lead * g.data_rows + strip) * g.data_columns + left) * spec.bits // 8
        pack(scratch.codes[:n], spec.bits, data[at:])
    return found
