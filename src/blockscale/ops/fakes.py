"""What the quantizing ops return, without its values: for compilers and planning."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import Format, get_format
from ..layouts import get_layout
from ..layouts.scales import stored_shape

__all__ = ["empty", "global_scale", "quantize", "quantize_both"]


def empty(
    x: Tensor, fmt: Format, axis: int, layout: str, offsets: Tensor | None, k_major: bool = False
) -> tuple[Tensor, Tensor]:
    """Data and scales as ``quantize`` returns them, without their values."""
    groups = offsets.shape[0] if offsets is not None else 0
    k_groups = groups if axis == -2 else 0
    data_shape = fmt.data_shape(x.shape, axis, k_groups, k_major)
    if fmt.turned(axis, k_major):
        flipped = (*data_shape[:-2], data_shape[-1], data_shape[-2])
        data = x.new_empty(flipped, dtype=fmt.element.dtype).mT
    else:
        data = x.new_empty(data_shape, dtype=fmt.element.dtype)
    shape = fmt.scale_shape(x.shape, axis, k_groups)
    scale_dtype = torch.uint8 if fmt.scale.nbytes == 1 else fmt.scale.dtype
    if layout == "compact":
        return data, x.new_empty(shape, dtype=scale_dtype)
    matrix = (shape[0], shape[1]) if axis == -1 else (shape[1], shape[0])
    where = get_layout(layout)
    stored = stored_shape(where, matrix, None if offsets is None or axis == -2 else groups)
    return data, x.new_empty(stored, dtype=where.stored_dtype(scale_dtype))


def gathered(x: Tensor, gather: Tensor | None) -> Tensor:
    """A tensor like ``x[gather]``, without its values."""
    return x if gather is None else x.new_empty(gather.shape[0], x.shape[1])


def quantize(
    x: Tensor,
    format: str,
    axis: int,
    layout: str,
    offsets: Tensor | None,
    k_major: bool,
    gather: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return empty(gathered(x, gather), get_format(format), axis, layout, offsets, k_major)


def quantize_both(
    x: Tensor,
    format: str,
    row_layout: str,
    column_layout: str,
    offsets: Tensor | None,
    k_major: bool,
    gather: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    fmt, x = get_format(format), gathered(x, gather)
    rows = empty(x, fmt, -1, row_layout, offsets)
    return *rows, *empty(x, fmt, -2, column_layout, offsets, k_major)


def global_scale(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)
