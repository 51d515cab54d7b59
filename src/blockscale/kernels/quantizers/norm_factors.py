# mypy: ignore-errors
"""What a norm in front of a quantizer multiplies elements by: statistics that were written before,
and its weight and bias."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, select_

from ..common import ptx
from ..common.norms import Factors
from .statistics_config import Places

__all__ = ["norm_factors"]

_ELEMENTS = 16


def norm_factors(producer: str, loaded, row, column, order) -> Factors:
    """Of 16 elements of ``row``, from ``column`` on, in the lane's ``order`` if there is one.
    ``loaded.weights`` lie as ``Places`` says."""
    rows, width = loaded.rows.stop, loaded.width
    places, base = Places.of(rows, width), loaded.weights.iterator.toint()
    known = row < rows
    stop = Int32(select_(known, width, Int32(0)))  # of columns that count
    row = cutlass.min(row, rows - 1)  # others become zeros, whatever they are made of
    start = cutlass.min(column, places.bias - places.weight - _ELEMENTS)

    def of_row(place):
        return ptx.load_global_float(base + (Int64(place) + row) * 4)

    def of_columns(place) -> list:
        first = base + (Int64(place) + start) * 4
        groups = [i if order is None else Int32(order ^ i) for i in range(0, _ELEMENTS, 4)]
        return [w.bitcast(Float32) for i in groups for w in ptx.load_words(first + i * 4)]

    centered = producer != "rmsnorm"
    columns = [column + (i if order is None else Int32(order ^ i)) for i in range(_ELEMENTS)]
    return Factors(
        rstd=of_row(places.rstd),
        minus_mean=ptx.multiply(of_row(places.mean), Float32(-1.0)) if centered else None,
        weight=of_columns(places.weight),
        bias=of_columns(places.bias) if producer == "biased_layernorm" else None,
        inside=[each < stop for each in columns],
    )
