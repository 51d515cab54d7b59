"""What parts a ScaledTensor of a shape has: their shapes, dtypes and order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .formats import get_format
from .layouts import Grouped, get_layout
from .remember import remembered

__all__ = ["StoredParts", "stored_parts", "strides_like"]


class StoredParts(NamedTuple):
    """Shapes and dtypes of the parts of a ScaledTensor."""

    data: tuple[int, ...]
    data_dtype: torch.dtype
    scale: tuple[int, ...]
    scale_dtypes: tuple[torch.dtype, ...]  # that of the layout; one-byte scales as uint8 too


@remembered
def stored_parts(
    format: str,
    layout: str,
    shape: tuple[int, ...],
    axis: int,
    groups: int | None,
    k_grouped: bool,
    has_global_scale: bool,
) -> StoredParts:
    """What stores a tensor of ``shape``; ValueError where nothing does."""
    fmt, where = get_format(format), get_layout(layout)
    if len(shape) < -axis:
        raise ValueError(f"axis: got {axis} for {len(shape)} dimension(s)")
    if fmt.has_global_scale != has_global_scale:
        verb = "needs" if fmt.has_global_scale else "has no"
        raise ValueError(f"global_scale: format {format!r} {verb} global_scale")
    if layout != "compact" and (len(shape) != 2 or k_grouped):
        raise ValueError(
            f"layout: {layout!r} stores the scales of one matrix; with leading "
            "dimensions, or groups along the contraction, scales are compact"
        )
    k_groups = groups if groups is not None and k_grouped else 0
    scale = fmt.scale_shape(shape, axis, k_groups)
    if layout != "compact":
        matrix = (scale[0], scale[1]) if axis == -1 else (scale[1], scale[0])
        if groups is None:
            scale = where.stored_shape(matrix)
        else:
            scale = Grouped(where).stored_shape(matrix, groups)
    dtype = where.stored_dtype(fmt.scale.dtype)
    return StoredParts(
        fmt.data_shape(shape, axis, k_groups),
        fmt.element.dtype,
        scale,
        (dtype, torch.uint8) if dtype.itemsize == 1 else (dtype,),
    )


def strides_like(shape: Sequence[int], data: Tensor) -> list[int] | None:
    """Strides of a dense tensor whose fastest dimension is that of the data; None: the last."""
    if len(shape) < 2 or data.stride(-1) == 1 or data.stride(-2) != 1:
        return None
    strides, step = [0] * len(shape), 1
    for dim in (len(shape) - 2, len(shape) - 1, *reversed(range(len(shape) - 2))):
        strides[dim] = step
        step = step * shape[dim]
    return strides
