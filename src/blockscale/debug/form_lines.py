"""Lines of JSON of what was seen in a step: numbers of all of it, found at once on the host.

They are made as text, as ``json.dumps`` would write it: dictionaries, and ``json.dumps`` of each,
take longer than all else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..formats import FP32, UE4M3
from ..kernels.common import watch_vector as at
from ..kernels.common.watch_vector import SUMS, nan_code
from ..kernels.cpu.spec import scale_values
from .form_samples import About

__all__ = ["Lines", "lines_of"]

_UE4M3 = scale_values(UE4M3).view(np.float32).astype(np.float64)
_SHARES = {"min": 0.0, "p1": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}
_LINE = (
    '%s, "format": %s, "calls": %d, "elements": %d, "amax": %s, "nonfinite_blocks": %d, %s'
    '"blocks": %d, "zero_blocks": %d, "scale_log2": %s, "scale_histogram": {%s}, %s}\n'
)
_PERCENTILES = "{" + ", ".join(f'"{name}": %d' for name in (*_SHARES, "spread")) + "}"
_COMPARED = (
    '"compared": %d, "sqnr_db": %s, "underflow": %r, "saturated": %r, "zeros": %r, '
    '"magnitude_histogram": %s'
)
_NOT_COMPARED = _COMPARED.replace("%r", "%s") % (0, *["null"] * 5)


class Lines(NamedTuple):
    """Of a file, with their ends; and the numbers of those with blocks that are not finite."""

    lines: list[str]
    nonfinite: list[int]


def lines_of(
    heads: Sequence[str], abouts: Sequence[About], vectors: np.ndarray, calls: Sequence[int]
) -> Lines:
    """The lines that begin with ``heads``: each is of so many ``calls``, one after the other, that
    were told ``abouts``, and have a row each of ``vectors`` (all calls, ``watch_vector.LENGTH``).
    """
    count = np.array(calls)
    starts = np.cumsum(count) - count
    alike = _Alike.of(abouts)
    codes = vectors[:, at.CODES_AT : at.SUMS_AT].astype(np.int64)
    bad = codes[np.arange(len(codes)), alike.nan]
    zeros = codes[:, 0] + np.where(alike.least > 1, codes[:, 1], 0)
    counts = np.add.reduceat(np.column_stack((alike.counts, zeros, bad)), starts)
    exponents = _exponents(codes, vectors[:, at.GLOBAL_SCALE], alike)
    percentiles, histograms = _exponent_texts(exponents, np.repeat(np.arange(len(calls)), count))
    sums = _added_up(vectors[:, at.SUMS_AT : at.ELEMENT], starts, count)
    where, nonfinite = [""] * len(calls), np.flatnonzero(counts[:, -1]).tolist()
    for i in nonfinite:
        first = starts[i] + np.flatnonzero(bad[starts[i] :])[0]
        where[i] = json.dumps(_where(abouts[first], vectors[first]))[1:-1] + ", "
    columns = (
        heads,
        [alike.texts[i] for i in starts.tolist()],
        calls,
        np.maximum.reduceat(vectors[:, at.AMAX], starts).tolist(),
        counts.tolist(),
        where,
        percentiles,
        histograms,
        _compared_texts(sums),
    )
    lines = [
        _LINE
        % (
            *(head, form, times, elements, repr(amax) if math.isfinite(amax) else "null"),
            *(spoilt, place, blocks, empty, order, histogram, compared),
        )
        for head, form, times, amax, (elements, blocks, empty, spoilt), place, order, histogram, (
            compared
        ) in zip(*columns, strict=True)
    ]
    return Lines(lines, nonfinite)


class _Alike(NamedTuple):
    """What only depends on what forms are, of each.

    Attributes:
        texts: format and shape.
        counts: elements, and blocks.
        least: the first code of a scale that is of no zeros: of these fp32 has its smallest normal
            number.
        nan: the code of NaN.
        is_ue4m3: else codes are exponents.
    """

    texts: list[str]
    counts: np.ndarray
    least: np.ndarray
    nan: np.ndarray
    is_ue4m3: np.ndarray

    @classmethod
    def of(cls, abouts: Sequence[About]) -> _Alike:
        different = {id(each): each for each in abouts}  # few: forms alike have the same one
        place = {key: i for i, key in enumerate(different)}
        which = [place[id(each)] for each in abouts]
        texts, *columns = zip(*map(_told, different.values()), strict=True)
        counts, least, nan, is_ue4m3 = (np.array(column)[which] for column in columns)
        return cls([texts[i] for i in which], counts, least, nan, is_ue4m3)


def _told(about: About) -> tuple[str, tuple[int, int], int, int, bool]:
    format = about.format
    text = f'"{format.name}", "shape": {list(about.shape)}'
    counts = math.prod(about.shape), math.prod(about.blocks)
    least = 2 if format.scale is FP32 else 1
    return text, counts, least, nan_code(format), format.scale is UE4M3


class _Exponents(NamedTuple):
    """floor(log2(scale)) of codes that occur, the form that each is of, and how often it does."""

    form: np.ndarray
    exponent: np.ndarray
    times: np.ndarray


def _exponents(codes: np.ndarray, scalars: np.ndarray, alike: _Alike) -> _Exponents:
    form, code = np.nonzero(codes)
    there = (code >= alike.least[form]) & (code < alike.nan[form])
    form, code = form[there], code[there]
    exponent = code - 127
    ue4m3 = alike.is_ue4m3[form]
    factor = scalars[form[ue4m3]]
    scale = _UE4M3[code[ue4m3]] * np.where(np.isnan(factor), 1, factor)
    exponent[ue4m3] = np.frexp(scale)[1] - 1
    return _Exponents(form, exponent, codes[form, code])


def _exponent_texts(found: _Exponents, line: np.ndarray) -> tuple[list[str], list[str]]:
    """Percentiles of each line, and how often exponents occur in it; ``line``: that of a form."""
    lines = int(line[-1]) + 1
    if not len(found.form):
        return ["null"] * lines, [""] * lines
    low, high = int(found.exponent.min()), int(found.exponent.max())
    width = high - low + 1
    place = line[found.form] * width + (found.exponent - low)
    times = np.bincount(place, found.times, lines * width).astype(np.int64).reshape(lines, width)
    of, which = np.nonzero(times)
    numbers = zip((which + low).tolist(), times[of, which].tolist(), strict=True)
    pairs = [f'"{exponent}": {number}' for exponent, number in numbers]
    ends = np.searchsorted(of, np.arange(lines + 1)).tolist()
    seen = times.cumsum(1)
    wanted = np.array([*_SHARES.values()]) * seen[:, -1:]
    wanted[:, 0] = 1  # the first that there is
    order = [low + (seen < each[:, None]).sum(1) for each in wanted.T]
    rows = np.stack([*order, order[-1] - order[0]], 1).tolist()
    percentiles = [
        _PERCENTILES % tuple(row) if begin < end else "null"
        for row, (begin, end) in zip(rows, pairwise(ends), strict=True)
    ]
    return percentiles, [", ".join(pairs[begin:end]) for begin, end in pairwise(ends)]


def _added_up(numbers: np.ndarray, starts: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Sums over the calls of each line, in their order: that of fp64 decides the last bits."""
    total = numbers[starts]
    for i in range(1, int(count.max())):
        more = count > i
        total[more] += numbers[starts[more] + i]
    return total


def _compared_texts(sums: np.ndarray) -> list[str]:
    """The text that each line has of its elements that were compared."""
    knows = sums[:, 0] > 0
    sums = np.where(knows[:, None], sums, 1)
    shares = sums[:, [SUMS.index(name) for name in ("flushed", "saturated", "zeros")]] / sums[:, :1]
    columns = (
        knows.tolist(),
        sums[:, SUMS.index("compared")].tolist(),
        sums[:, SUMS.index("signal")].tolist(),
        sums[:, SUMS.index("noise")].tolist(),
        shares.tolist(),
        sums[:, len(SUMS) :].astype(np.int64).tolist(),
    )
    return [
        _COMPARED % (n, _decibel(signal, noise), *share, magnitudes) if known else _NOT_COMPARED
        for known, n, signal, noise, share, magnitudes in zip(*columns, strict=True)
    ]


def _decibel(signal: float, noise: float) -> str:
    """Null: nothing was lost, there is nothing, or a value became infinite: no JSON has -inf."""
    return repr(10 * math.log10(signal / noise)) if signal and 0 < noise < math.inf else "null"


def _where(form: About, vector: np.ndarray) -> dict[str, Any]:
    """Where the first is that is not finite; where nobody has the values, its block begins."""
    block, inside, value = vector[[at.FIRST_BLOCK, at.ELEMENT, at.VALUE]].tolist()
    block = int(block)
    height, size = form.format.block
    *lead, down, across = form.blocks
    row, column, of_matrix = block // across % down, block % across, down * across
    if form.axis == -1:
        row, column = row * height, column * size
    else:
        row, column = row * size, column * height
    named = None
    if inside < height * size:  # else nobody has the values
        line, along = divmod(int(inside), size)
        down, right = (line, along) if form.axis == -1 else (along, line)
        row, column = row + down, column + right
        named = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    matrix = [block // of_matrix] if lead else []
    return {"first_nonfinite": [*matrix, row, column], "first_nonfinite_value": named}
