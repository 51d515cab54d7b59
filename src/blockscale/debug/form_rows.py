"""Rows of words that a GPU's kernel writes of forms, and the numbers in them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import Format
from ..kernels.watch.config import Row, Word
from ..kernels.watch.plan import Lines, WatchPlan
from .form_numbers import COMPARED, Blocks, Measured, compare
from .form_samples import CODES, Sample

__all__ = ["FormRows", "RowWay"]

_ROWS = 64  # of forms alike that are kept together


class RowWay(NamedTuple):
    """How forms alike are looked at. ``there``: elements of picked blocks that are no padding."""

    plan: WatchPlan
    about: Sample
    there: Tensor


class _Kept(NamedTuple):
    """Rows of forms alike, what each is of, and its number."""

    rows: Tensor
    ways: list[RowWay]
    numbers: list[int]


class FormRows:
    """Those of a step. Nothing is read back before they are evaluated."""

    def __init__(self) -> None:
        self._kept: dict[Any, list[_Kept]] = {}

    def add(self, number: int, way: RowWay, lines: Lines) -> None:
        """Keep the row of a form by its ``number``."""
        kept = self._room(way)
        way.plan(lines, kept.rows, len(kept.ways))
        kept.ways.append(way)
        kept.numbers.append(number)

    def _room(self, way: RowWay) -> _Kept:
        alike = self._kept.setdefault((way.plan.row, way.about.format, way.there.device), [])
        if not alike or len(alike[-1].ways) == _ROWS:
            shape, device = (_ROWS, way.plan.row.words), way.there.device
            alike.append(_Kept(torch.zeros(shape, dtype=torch.int32, device=device), [], []))
        return alike[-1]

    def evaluate(self) -> dict[int, Measured]:
        """The numbers of all forms by theirs; nothing is kept any more."""
        found: dict[int, Measured] = {}
        for alike in self._kept.values():
            for rows, ways, numbers in alike:
                vectors = _vectors(rows[: len(ways)], ways)
                for number, way, vector in zip(numbers, ways, vectors, strict=True):
                    found[number] = Measured(way.about, vector)
        self._kept.clear()
        return found


def _vectors(rows: Tensor, ways: list[RowWay]) -> Tensor:
    """Of each row, as ``form_numbers`` has them."""
    row, about, count = ways[0].plan.row, ways[0].about, len(rows)
    wide: Any = {"dtype": torch.float64, "device": rows.device}
    first = rows[:, Word.FIRST] - 1  # where it is -1, nobody asks
    amax, scalar = _floats(rows[:, Word.AMAX]), _floats(rows[:, Word.GLOBAL_SCALE])
    if not about.format.has_global_scale:
        scalar = scalar * math.nan
    if row.picks:
        sums = compare(about.format, _blocks(rows, row, about.format, ways))
    else:
        amax = amax * math.nan
        sums = torch.full((count, COMPARED), math.nan, **wide)
    inside = rows[:, Word.ELEMENT] - 1
    inside = torch.where(inside < 0, math.prod(about.format.block), inside)
    named = torch.stack((inside.to(**wide), _floats(rows[:, Word.VALUE]).to(**wide)), 1)
    ahead = torch.stack([each.to(**wide) for each in (amax, first, scalar)], 1)
    return torch.cat((ahead, rows[:, Word.CODES : Word.CODES + CODES].to(**wide), sums, named), 1)


def _floats(words: Tensor) -> Tensor:
    return words.contiguous().view(torch.float32)


def _blocks(rows: Tensor, row: Row, format: Format, ways: list[RowWay]) -> Blocks:
    """Picked blocks of each row."""
    count, n = len(rows), row.picks
    x = _floats(rows[:, row.x : row.scale]).view(count, n, row.size)
    scale = rows[:, row.scale : row.data]
    scale = _floats(scale) if format.scale.nbytes == 4 else scale.to(torch.uint8)
    data = rows[:, row.data :].contiguous().view(torch.uint8)[:, : n * row.stored]
    scalar = _floats(rows[:, Word.GLOBAL_SCALE]) if format.has_global_scale else None
    there = torch.stack([way.there for way in ways])
    return Blocks(x, data.reshape(count, n, row.stored), scale, scalar, there)
