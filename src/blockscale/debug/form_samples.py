"""What a watched step keeps of a tensor that a layer has just quantized: counts of all of its
scales, and some of its blocks beside what they were made of.

Nothing is read back from a device here, and nothing is quantized again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import Format
from ..kernels.common.watch_vector import CODES, nan_code
from ..memory import as_bytes
from ..nn.group_operands import Activated, ActivatedBackward, Rows
from ..tensor import ScaledTensor

__all__ = [
    "SAMPLE",
    "About",
    "Grid",
    "Picks",
    "Sample",
    "counted",
    "spread",
    "take_sample",
    "values_of",
]

SAMPLE = 2**12  # elements of a form that are compared with what they were made of
#: Of blocks: their matrix, line, and number in the line.
Place = tuple[Tensor, Tensor, Tensor]
_CPU = torch.device("cpu")
_ROWS = 256  # of what experts make of others' rows: activations are computed for these alone


class Picks(NamedTuple):
    """Blocks beside what they were made of: ``x`` (n, B), ``data`` in bytes, ``scale`` (n,) as it
    is stored, ``global_scale`` (n,) or (1,). The last ``format.block[0]`` are of the first block
    that is not finite, or of any; of the others ``there`` elements are no padding."""

    x: Tensor
    data: Tensor
    scale: Tensor
    global_scale: Tensor
    there: Tensor


class About(NamedTuple):
    """What a form is: its format, shape and axis, and how many blocks its compact scales are of."""

    format: Format
    shape: tuple[int, ...]
    axis: int
    blocks: tuple[int, ...]


class Sample(NamedTuple):
    """Of one form; tensors are on its device.

    Attributes:
        histogram: int64 (256,), how often each code of a scale occurs (``watch_vector``).
        first: int64, the number of the first block that is not finite; any, or None, if all are.
        limits: the least and the largest value; None where nobody has the values.
        picks: None likewise, and of columns of groups.
    """

    about: About
    histogram: Tensor
    first: Tensor | None
    limits: tuple[Tensor, Tensor] | None
    global_scale: Tensor | None
    picks: Picks | None


def counted(numbers: Tensor, bins: int) -> Tensor:
    """Count how often each number below ``bins`` occurs."""
    if numbers.is_cpu:
        return torch.bincount(numbers, minlength=bins)
    found = torch.zeros(bins, dtype=torch.int64, device=numbers.device)  # bincount would wait
    one = torch.ones((), dtype=torch.int64, device=numbers.device)
    return found.scatter_add_(0, numbers.long(), one.expand(len(numbers)))


def values_of(x: Any) -> Any:
    """Return what has the values of ``x``: a tensor, a source of rows, or None."""
    if isinstance(x, tuple):  # two stacks, whose rows lie below each other in each group
        return torch.cat([each.detach() for each in x], 1)
    x = getattr(x, "source", x)  # of ranks that agree on a global scale
    if isinstance(x, Tensor):  # a weight that ranks have gathered quantized has none
        x = getattr(x, "master", x)
        return x.detach() if x is not None and x.requires_grad else x
    return x if isinstance(x, Rows | Activated | ActivatedBackward) else None


def take_sample(x: Any, q: ScaledTensor, limits: tuple[Tensor, Tensor] | None) -> Sample:
    """Keep a sample of ``q``, which was made of ``x`` (see :func:`values_of`)."""
    scale = q.compact_bytes()
    code = scale if scale.dtype == torch.uint8 else (scale.view(torch.int32) >> 23) & 255
    histogram = counted(code.flatten(), CODES)
    if code.is_cpu and not int(histogram[nan_code(q.format)]):  # to look costs nothing here
        first = None
    else:
        first = (code == nan_code(q.format)).flatten().view(torch.uint8).argmax()
    picks = None
    if x is not None and not q.k_grouped and _has_one_scale_a_matrix(q):
        picks = _pick(x, q, scale, first)
    about = About(q.format, tuple(q.shape), q.axis, tuple(code.shape))
    return Sample(about, histogram, first, limits, q.global_scale, picks)


def _has_one_scale_a_matrix(q: ScaledTensor) -> bool:
    scalar = q.global_scale
    return scalar is None or scalar.numel() == 1 or scalar.shape == q.shape[:-2]


def _pick(x: Any, q: ScaledTensor, scale: Tensor, first: Tensor | None) -> Picks:
    """Blocks evenly spread, and the ``first`` that is not finite, or any."""
    format, (height, size) = q.format, q.format.block
    scales = _lines(scale, q.axis)
    data = _lines(as_bytes(q.qdata), q.axis)
    stored = format.element.stored(size)
    data = data.unfold(-1, stored, stored)
    matrices, lines, across = data.shape[:3]
    place = _zeros(height, q.device)
    if first is not None:
        place = _place(first, scales.shape, q.axis, height, lines)
    if isinstance(x, Tensor):
        grid = Grid(matrices, lines, across, SAMPLE // size, q.device)
        places = _settled(grid, height) if first is None else _joined(spread(grid), place)
        found = _blocks(_lines(x, q.axis), size)[*places]
    else:  # rows of experts, some of which are made again
        rows = _evenly(lines, min(lines, _ROWS), q.device)
        values = _rows_of(x, torch.cat((rows, place[1])))
        grid = Grid(1, len(rows), across, SAMPLE // size, q.device)
        zeros, nearby, blocks = spread(grid)
        places = _joined((zeros, rows[nearby], blocks), place)
        nearby = torch.cat((nearby, torch.arange(len(rows), len(values), device=q.device)))
        found = _blocks(values, size)[nearby, places[2]]
    matrix, line, block = places
    scalar = q.global_scale
    if scalar is None:
        scalar = _one(q.device)
    elif scalar.numel() > 1:
        scalar = scalar.flatten()[matrix]
    scale, scalar = scales[matrix, line // height, block], scalar.reshape(-1)
    return Picks(found, data[*places], scale, scalar, _there(grid, q.shape[q.axis], size))


def _lines(x: Tensor, axis: int) -> Tensor:
    """Along whose last dimension blocks run: (matrices, lines, elements)."""
    x = x if axis == -1 else x.mT
    return x.reshape(-1, *x.shape[-2:]) if x.dim() != 3 else x


def _blocks(lines: Tensor, size: int) -> Tensor:
    """Views of blocks, whole ones: (..., blocks, size)."""
    rest = -lines.shape[-1] % size
    if rest:
        lines = torch.nn.functional.pad(lines, (0, rest))
    return lines.unfold(-1, size, size)


def _place(first: Tensor, scales: torch.Size, axis: int, height: int, lines: int) -> Place:
    """Of the lines of this block, which is counted as scales lie: matrix, line and block."""
    _, down, across = scales
    if axis == -1:
        line, block = first // across % down, first % across
    else:
        line, block = first % down, first // down % across
    inside = torch.arange(height, device=first.device)
    line = (line * height + inside).clamp(max=lines - 1)
    return (first // (down * across)).expand(height), line, block.expand(height)


class Grid(NamedTuple):
    """Blocks of matrices of lines, and how many are ``wanted``."""

    matrices: int
    lines: int
    across: int
    wanted: int
    device: torch.device


@lru_cache(1024)
def spread(grid: Grid) -> Place:
    """Some blocks, or all; found on the host, so that no stream may read them too early."""
    matrices, lines, across, wanted, device = grid
    total = matrices * lines * across
    flat = _evenly(total, min(total, wanted), _CPU)
    place = flat // (lines * across), flat // across % lines, flat % across
    matrix, line, block = (each.to(device) for each in place)
    return matrix, line, block


@lru_cache(1024)
def _settled(grid: Grid, height: int) -> Place:
    """And the first one, where none is wanted."""
    return _joined(spread(grid), _zeros(height, grid.device))


@lru_cache(1024)
def _there(grid: Grid, length: int, size: int) -> Tensor:
    """Elements of blocks of lines of this ``length``."""
    block = spread(grid._replace(device=_CPU))[2]
    return (length - block * size).clamp(max=size).to(grid.device)


@lru_cache(64)
def _zeros(height: int, device: torch.device) -> Place:
    zeros = torch.zeros(height, dtype=torch.int64, device=device)
    return zeros, zeros, zeros


def _joined(a: Place, b: Place) -> Place:
    first, second, third = (torch.cat(pair) for pair in zip(a, b, strict=True))
    return first, second, third


@lru_cache(256)
def _evenly(total: int, count: int, device: torch.device) -> Tensor:
    """One of each of ``count`` equal parts, not at equal distances: rows may repeat, as those of
    sequences do."""
    place = torch.arange(count, dtype=torch.float64)
    jitter = (place * 0.6180339887498949) % 1 if count < total else torch.zeros(())
    return ((place + jitter) * total / count).long().clamp(max=total - 1).to(device)


@lru_cache(64)
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def _rows_of(source: Any, rows: Tensor) -> Tensor:
    """Values of these rows alone."""
    if isinstance(source, Rows):
        return source.x[rows if source.gather is None else source.gather[rows]]
    weights = None if source.weights is None else source.weights[rows]
    if isinstance(source, Activated):
        return Activated(source.activation, source.h[rows], weights).values()[0]
    grad, h = source.grad[rows], source.h[rows]
    return ActivatedBackward(source.activation, grad, h, weights).values()[0]
