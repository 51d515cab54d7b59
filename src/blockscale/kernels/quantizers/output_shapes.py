"""The shapes in which a kernel writes what it quantizes, and in which that is returned."""

from __future__ import annotations

import math
from typing import NamedTuple

from ...formats import Format
from ...layouts import get_layout
from ...layouts.scales import stored_shape

__all__ = ["OutputShapes", "output_shapes"]


class OutputShapes(NamedTuple):
    """Of data and scales along one axis.

    Attributes:
        lines: of data, as the kernel writes it.
        data: as it is returned, the transpose of a batch's or matrix's lines if it is ``turned``.
        flat: of scales, as the kernel writes them.
        scale: as they are returned.
        turned: data is stored column by column.
    """

    lines: tuple[int, ...]
    data: tuple[int, ...]
    flat: tuple[int, ...]
    scale: tuple[int, ...]
    turned: bool


def output_shapes(
    shape: tuple[int, ...],
    format: Format,
    axis: int,
    layout: str,
    groups: int | None = None,
    k_major: bool = False,
    batched: bool = False,
) -> OutputShapes:
    """What becomes of a tensor of ``shape``; ``groups``: whose rows are so many experts';
    ``k_major``: as :func:`blockscale.quantize` takes it; ``batched``: matrix by matrix.
    """
    k_groups = groups if groups is not None and axis == -2 else 0
    data = format.data_shape(shape, axis, k_groups, k_major)
    scale = format.scale_shape(shape, axis, k_groups)
    outer = (scale[0], scale[-1]) if axis == -1 else (scale[-1], scale[0])
    stored: tuple[int, ...] = scale
    if layout != "compact":
        stored = stored_shape(get_layout(layout), outer, groups if axis == -1 else None)
    turned = format.turned(axis, k_major)
    flat, lines = stored, data
    if batched:
        count = math.prod(shape[:-2])
        flat, lines = (count, *scale[-2:]), (count, *data[-2:])
    elif len(shape) != 2:
        flat, lines = (_flat(each) for each in (scale, data))
    lines = (*lines[:-2], *lines[:-3:-1]) if turned else lines
    return OutputShapes(lines, data, flat, stored, turned)


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """All dimensions but the last taken as one."""
    return math.prod(shape[:-1]), shape[-1]
