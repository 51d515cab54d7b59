"""Dimensions of quantized arrays, and which of them belong together, for :mod:`.cut`.

Rows are cut between blocks, and so is the contraction where it is not padded: elements and scales
of a shard are those of the whole. Scales in other layouts than "compact" lie in tiles, which are
not cut, and neither are their elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax

from ..formats import Format
from .cut import Dims, Factor
from .formulas import Asked, GlobalScale, Stored

__all__ = [
    "Matrix",
    "of_dequantize",
    "of_quantize",
    "of_scalars",
    "of_values",
    "parts",
    "plain",
    "whole",
]

#: Names of the last two dimensions, and how many items of each belong together; none is not cut.
Matrix = tuple[tuple[str, int | None], tuple[str, int | None]]


def of_values(shape: Sequence[int], asked: GlobalScale) -> Dims:
    """Dimensions of an array whose largest magnitude is looked for, which is cut between blocks of
    a transform."""
    return plain(len(shape), _matrix(shape, [_rotated(asked)], fits=True))


def whole(tree: Any) -> list[Dims]:
    """Dimensions of arrays that are not cut, one entry for each leaf."""
    return [()] * len(jax.tree.leaves(tree))


def of_quantize(
    shape: Sequence[int], scalar: jax.Array | None, asked: Sequence[Asked], grouped: bool
) -> tuple[Dims, list[Dims], list[Dims]]:
    """Dimensions of ``x``, of its global scale, if it has one, and of data and scales along each
    axis. Rows that are ``grouped`` are not cut."""
    ndim, seed = len(shape), asked[0].seed
    fits = all(each.layout.name == "compact" for each in asked) and not grouped
    blocks = [_along(each.blocked.block, each.axis) for each in asked]
    matrix = _matrix(shape, [*blocks, *map(_rotated, asked)], fits)
    kept = 0 if seed is None else ndim - 3  # where indices of a shard's matrices have one stride
    x = plain(ndim, matrix, kept)
    results = list[Dims]()
    for each in asked:
        turned = each.format.turned(each.axis, each.k_major), False
        results += parts(ndim, matrix, each.format, each.axis, turned, kept)
    return x, of_scalars(ndim, scalar, kept), results


def of_dequantize(stored: Stored, scalar: jax.Array | None) -> tuple[Dims, list[Dims]]:
    """Dimensions of the values, and of data, scales and the global scale."""
    format, axis, layout, shape, turned = stored
    matrix = _matrix(shape, [_along(format.block, axis)], layout == "compact")
    values = plain(len(shape), matrix)
    found = parts(len(shape), matrix, format, axis, turned)
    return values, [*found, *of_scalars(len(shape), scalar)]


def _along(block: tuple[int, int], axis: int) -> tuple[int, int]:
    """Rows and columns of blocks along an axis."""
    return block if axis == -1 else block[::-1]


def _rotated(asked: Asked | GlobalScale) -> tuple[int, int]:
    """Rows and columns of a transform's blocks."""
    return _along((1, 1 if asked.hadamard is None else asked.hadamard[0]), asked.axis)


def _matrix(shape: Sequence[int], blocks: Sequence[tuple[int, int]], fits: bool) -> Matrix:
    """In whole blocks of all kinds, where a shard's lie as those of the whole."""
    rows, columns = (math.lcm(*each) for each in zip(*blocks, strict=True))
    return (
        ("rows", rows if fits and shape[-2] % rows == 0 else None),
        ("columns", columns if fits and shape[-1] % columns == 0 else None),
    )


def plain(ndim: int, matrix: Matrix, kept: int = 0) -> Dims:
    """Dimensions of values: those of the matrix, and leading ones, of which so many after the first
    are ``kept`` whole."""
    last = [None if unit is None else Factor(name, unit) for name, unit in matrix]
    return (*_lead(ndim - 2, kept), *last)


def _lead(count: int, kept: int) -> Dims:
    return tuple(Factor(f"batch{i}") if i == 0 or i > kept else None for i in range(count))


def parts(
    ndim: int,
    matrix: Matrix,
    format: Format,
    axis: int,
    turned: tuple[bool, bool],
    kept: int = 0,
) -> list[Dims]:
    """Dimensions of data and of scales."""
    block = _along(format.block, axis)
    data, scale = list[Factor | None](), list[Factor | None]()
    for place, (name, unit), size in zip((-2, -1), matrix, block, strict=True):
        packed = None if unit is None else format.element.stored(unit) if place == axis else unit
        data.append(None if packed is None else Factor(name, packed))
        scale.append(None if unit is None else Factor(name, unit // size))
    lead = _lead(ndim - 2, kept)
    found = [
        (*lead, *(each[::-1] if swapped else each))
        for each, swapped in zip((data, scale), turned, strict=True)
    ]
    # scales in tiles have other dimensions
    return found if any(unit for _, unit in matrix) else [lead, lead]


def of_scalars(ndim: int, scalar: jax.Array | None, kept: int = 0) -> list[Dims]:
    """Of a global scale: one, or one for each matrix."""
    return [] if scalar is None else [_lead(ndim - 2, kept) if scalar.ndim else ()]
