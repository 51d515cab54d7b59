"""Scales of a tensor, blocked along either axis: compact, and as a layout stores them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arrays import Array
from .base import Layout
from .grouped import Grouped

__all__ = ["stored_shape", "swizzle_scale", "unswizzle_scale"]


def stored_shape(layout: Layout, shape: tuple[int, int], groups: int | None) -> tuple[int, ...]:
    """Shape in which ``layout`` stores scales (rows, blocks), of so many ``groups`` of rows, if
    there are some."""
    if groups is None or not layout.spreads:
        return layout.stored_shape(shape)
    return Grouped(layout).stored_shape(shape, groups)


def swizzle_scale(scale: Array, axis: int, layout: Layout, offsets: Array | None) -> Array:
    """Compact scales of a tensor blocked along ``axis``, as ``layout`` stores them.

    ``offsets``: the end of each group of rows, where each starts on a tile of its own, if the
    layout spreads them.
    Raises ValueError unless there is one matrix of them, of a size that the layout can hold.
    """
    if layout.name == "compact":
        return scale
    matrix = scale if axis == -1 else scale.mT
    if offsets is None or not layout.spreads:
        return layout.swizzle(matrix)
    return Grouped(layout).swizzle(matrix, offsets)


def unswizzle_scale(
    stored: Array,
    axis: int,
    layout: Layout,
    shape: Sequence[int],
    dtype: Any,
    offsets: Array | None,
) -> Array:
    """The inverse of :func:`swizzle_scale`: compact scales of ``shape``, as ``dtype``."""
    if layout.name == "compact":
        return stored
    rows, blocks = shape if axis == -1 else reversed(shape)
    if offsets is None or not layout.spreads:
        matrix = layout.unswizzle(stored, (rows, blocks), dtype)
    else:
        matrix = Grouped(layout).unswizzle(stored, (rows, blocks), dtype, offsets)
    return matrix if axis == -1 else matrix.mT
