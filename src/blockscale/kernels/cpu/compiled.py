# mypy: ignore-errors
"""The compiled functions that Python calls."""

from __future__ import annotations

from pathlib import Path

from ... import error_sums, jit
from ..common import watch_vector
from . import (
    arith,
    comparing,
    decoding,
    encoding,
    multiplying,
    pairing,
    scaling,
    swiglu,
    tiling,
    watching,
)

_numbers = Path(error_sums.__file__), Path(watch_vector.__file__)
_sources = [*sorted(Path(__file__).parent.glob("*.py")), *_numbers]
#: What the compiled functions are made of.
SOURCES = [*_sources, Path(jit.__file__)]
_cached = jit.cached(SOURCES)


@_cached
def quantize_tiles(
    x, data, scale8, scale32, geometry, spec, encode_scale, table, seed, place, scratch, first, last
):
    encoding.quantize_tiles(
        x, data, scale8, scale32, geometry, spec, encode_scale, table, seed, place, scratch, first,
        last,
    )  # fmt: skip


@_cached
def quantize_best_tiles(
    x, data, scale8, geometry, spec, factors, table, scales, scratch, first, last
):
    return scaling.quantize_best_tiles(
        x, data, scale8, geometry, spec, factors, table, scales, scratch, first, last
    )


@_cached
def amax_tiles(x, geometry, limit, amax, first, last):
    return encoding.amax_tiles(x, geometry, limit, amax, first, last)


@_cached
def dequantize_tiles(
    data, scale8, scale32, out, geometry, spec, values, scales, global_scale, least, scratch,
    first, last,
):  # fmt: skip
    decoding.dequantize_tiles(
        data, scale8, scale32, out, geometry, spec, values, scales, global_scale, least, scratch,
        first, last,
    )  # fmt: skip


@_cached
def compare_tiles(
    x, data, scale8, scale32, geometry, spec, values, scales, global_scale, least, largest,
    scratch, sums, first, last,
):  # fmt: skip
    comparing.compare_tiles(
        x, data, scale8, scale32, geometry, spec, values, scales, global_scale, least, largest,
        scratch, sums, first, last,
    )  # fmt: skip


@_cached
def multiply_rows(
    x, data, scale8, scale32, out, geometry, spec, values, scales, global_scale, least, scratch,
    first, last,
):  # fmt: skip
    multiplying.multiply_rows(
        x, data, scale8, scale32, out, geometry, spec, values, scales, global_scale, least, scratch,
        first, last,
    )  # fmt: skip


@_cached
def pair_row_tiles(
    data, scale8, scale32, out, geometry, spec, values, scales, least, scratch, first, last
):
    return pairing.pair_row_tiles(
        data, scale8, scale32, out, geometry, spec, values, scales, least, scratch, first, last
    )


@_cached
def interleave_rows(pairs, out, rows, columns, width, first, last):
    pairing.interleave_rows(pairs, out, rows, columns, width, first, last)


@_cached
def pair_column_tiles(
    data, scale8, scale32, out, geometry, spec, values, scales, least, panels, scratch, first, last
):
    return pairing.pair_column_tiles(
        data, scale8, scale32, out, geometry, spec, values, scales, least, panels, scratch, first,
        last,
    )  # fmt: skip


@_cached
def multiply_tiles(a, b, out, m, n, pairs, panels, a_scalar, b_scalar, sums, first, last):
    tiling.multiply_tiles(a, b, out, m, n, pairs, panels, a_scalar, b_scalar, sums, first, last)


@_cached
def watch_lines(x, data, scale, shape, places, constants, factor, found):
    watching.watch_lines(x, data, scale, shape, places, constants, factor, found)


@_cached
def swiglu_rows(x, out, first, last):
    swiglu.swiglu_rows(x, out, first, last)


@_cached
def swiglu_backward_rows(grad, x, out, first, last):
    swiglu.swiglu_backward_rows(grad, x, out, first, last)


@_cached
def ue4m3_reciprocals(global_scale, largest, values, reciprocals):
    return arith.ue4m3_reciprocals(global_scale, largest, values, reciprocals)
