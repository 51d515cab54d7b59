"""Dimensions of quantized arrays, and which of them belong together, for :mod:`.cut`.

Rows are cut between blocks, and so is the contraction where it is not padded: elements and scales
of a shard are those of the whole. Scales in other layouts than "compact" lie in tiles, which are
not cut, and neither are their elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax

from ..formats import Format
from .cut import Dims, Factor
from .formulas import Asked, Stored

__all__ = [
    "Matrix",
    "of_dequantize",
    "of_quantize",
    "of_scalars",
    "of_values",
    "parts",
    "plain",
]

#: Names of the last two dimensions, and how many items of each belong together; none is not cut.
Matrix = tuple[tuple[str, int | None], tuple[str, int | None]]


def of_values(shape: Sequence[int]) -> Dims:
    """Of an array that may be cut anywhere."""
    return plain(len(shape), (("rows", 1), ("columns", 1)))


def of_quantize(
    shape: Sequence[int], scalar: jax.Array | None, asked: Sequence[Asked]
) -> tuple[Dims, list[Dims], list[Dims]]:
    """Of ``x``, of its global scale, if it has one, and of data and scales along each axis."""
    ndim, seed = len(shape), asked[0].seed
    compact = all(each.layout.name == "compact" for each in asked)
    matrix = _matrix(shape, [(each.format, each.axis) for each in asked], compact)
    kept = 0 if seed is None else ndim - 3  # where indices of a shard's matrices have one stride
    x = plain(ndim, matrix, kept)
    results = list[Dims]()
    for each in asked:
        turned = each.format.turned(each.axis, each.k_major), False
        results += parts(ndim, matrix, each.format, each.axis, turned, kept)
    return x, of_scalars(ndim, scalar, kept), results


def of_dequantize(stored: Stored, scalar: jax.Array | None) -> tuple[Dims, list[Dims]]:
    """Of the values, and of data, scales and the global scale."""
    format, axis, layout, shape, turned = stored
    matrix = _matrix(shape, [(format, axis)], layout == "compact")
    values = plain(len(shape), matrix)
    found = parts(len(shape), matrix, format, axis, turned)
    return values, [*found, *of_scalars(len(shape), scalar)]


def _matrix(shape: Sequence[int], formats: Sequence[tuple[Format, int]], compact: bool) -> Matrix:
    """In whole blocks of formats, along their axes."""
    blocks = [f.block if axis == -1 else f.block[::-1] for f, axis in formats]
    rows, columns = (math.lcm(*each) for each in zip(*blocks, strict=True))
    return (
        ("rows", rows if compact and shape[-2] % rows == 0 else None),
        ("columns", columns if compact and shape[-1] % columns == 0 else None),
    )


def plain(ndim: int, matrix: Matrix, kept: int = 0) -> Dims:
    """Of values: leading dimensions, but for so many after the first, and the matrix."""
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
    """Of data and of scales."""
    block = format.block if axis == -1 else format.block[::-1]
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
