"""What a watched step keeps of forms on a GPU: a row of words of each, by one launch."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import Format
from ..kernels.common.gpu import Unsupported
from ..kernels.common.runtime import describe, gpu_of
from ..kernels.watch.config import Row, Word
from ..kernels.watch.plan import Lines, Matrix, WatchPlan, plan_watch
from ..nn.observing import Form, Made
from ..tensor import ScaledTensor
from .form_numbers import COMPARED, Blocks, Measured, compare
from .form_samples import CODES, SAMPLE, Grid, Sample, spread, there_of

__all__ = ["FormRows"]

_ROWS = 64  # of forms alike that are kept together
_UNSIGNED = 0xFFFFFFFF


class _Way(NamedTuple):
    """How forms alike are looked at. ``there``: elements of picked blocks that are no padding."""

    plan: WatchPlan
    about: Sample
    there: Tensor
    turned: bool


class _Kept(NamedTuple):
    """Rows of forms alike, what each is of, and its number."""

    rows: Tensor
    ways: list[_Way]
    numbers: list[int]


class FormRows:
    """Rows of the forms of a step. What is launched is known from the second step on."""

    def __init__(self) -> None:
        self._ways: dict[Any, _Way | None] = {}
        self._kept: dict[Any, list[_Kept]] = {}

    def add(self, number: int, x: Tensor | None, form: Form) -> bool:
        """Keep the row of a form, which was made of ``x``, by its ``number``; False where no kernel
        looks at it."""
        if gpu_of(form.parts.data.device if isinstance(form, Made) else form.device) is None:
            return False
        key = _key(x, form)
        if key not in self._ways:
            self._ways[key] = _find_way(x, form)
        way = self._ways[key]
        if way is None:
            return False
        kept = self._room(way)
        way.plan(_lines(x, form, way.turned), kept.rows, len(kept.ways))
        kept.ways.append(way)
        kept.numbers.append(number)
        return True

    def _room(self, way: _Way) -> _Kept:
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


def _key(x: Tensor | None, form: Form) -> Any:
    """Forms with the same key are looked at alike."""
    if isinstance(form, Made):
        return form.launch, form.axis, describe(x)
    return (
        *(form.format_name, form.shape, form.axis, form.layout_name, form.global_scale is None),
        *(form.qdata.stride(), form.qscale.stride(), form.offsets is None, form.device),
        describe(x),
    )


def _lines(x: Tensor | None, form: Form, turned: bool) -> Lines:
    if isinstance(form, ScaledTensor):
        return Lines.of(x, _matrix(form))
    data, scale, global_scale = form.parts
    if form.axis == -2:
        x, data = None if x is None else x.mT, data if turned else data.mT
    return Lines(x, data, scale, global_scale)


def _matrix(q: ScaledTensor) -> Matrix:
    shape: Any = tuple(q.shape)
    parts = q.qdata, q.qscale, q.global_scale
    return Matrix(q.format, shape, q.axis, q.layout_name, *parts)


def _find_way(x: Tensor | None, form: Form) -> _Way | None:
    """None where there is none."""
    device, turned, like = _place(form)
    scalar = like.global_scale
    if like.dim() != 2 or like.offsets is not None:
        return None
    if scalar is not None and scalar.dim():
        return None
    format, axis = like.format, like.axis
    lines, k = like.shape if axis == -1 else like.shape[::-1]
    blocks = -(-k // format.block_size)
    grid = Grid(1, lines, blocks, SAMPLE // format.block_size, device)
    places = _flat(grid) if x is not None else torch.empty(0, dtype=torch.int32, device=device)
    try:
        plan = plan_watch(x, _matrix(like), places, device, gpu_of(device))
    except Unsupported:
        return None
    shape = -(-lines // format.block[0]), blocks
    empty = places.new_empty(0)
    about = Sample(
        *(format, tuple(like.shape), axis, shape if axis == -1 else shape[::-1], empty),
        *(None, None, None, None),
    )
    return _Way(plan, about, there_of(grid, k, format.block_size)[: len(places)], turned)


def _place(form: Form) -> tuple[torch.device, bool, ScaledTensor]:
    """The device, whether lines are columns as they are stored, and what the form is like."""
    if isinstance(form, ScaledTensor):
        return form.device, False, form
    like = form.launch.form(form.launch.unwritten(form.axis), form.axis)
    return form.parts.data.device, form.launch.is_turned(form.axis), like


@lru_cache(1024)
def _flat(grid: Grid) -> Tensor:
    """Picked blocks as the kernel counts them."""
    _, line, block = spread(grid)
    return (line * grid.across + block).int()


def _vectors(rows: Tensor, ways: list[_Way]) -> Tensor:
    """Of each row, as ``form_numbers`` has them."""
    row, about, count = ways[0].plan.row, ways[0].about, len(rows)
    wide: Any = {"dtype": torch.float64, "device": rows.device}
    last = rows[:, Word.LAST].long() & _UNSIGNED
    first = torch.where(last > 0, _UNSIGNED - last, math.inf)
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


def _blocks(rows: Tensor, row: Row, format: Format, ways: list[_Way]) -> Blocks:
    """Picked blocks of each row."""
    count, n = len(rows), row.picks
    x = _floats(rows[:, row.x : row.scale]).view(count, n, row.size)
    scale = rows[:, row.scale : row.data]
    scale = _floats(scale) if format.scale.nbytes == 4 else scale.to(torch.uint8)
    data = rows[:, row.data :].contiguous().view(torch.uint8)[:, : n * row.stored]
    scalar = _floats(rows[:, Word.GLOBAL_SCALE]) if format.has_global_scale else None
    there = torch.stack([way.there for way in ways])
    return Blocks(x, data.reshape(count, n, row.stored), scale, scalar, there)
