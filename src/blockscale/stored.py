"""What parts a ScaledTensor of a shape has: their shapes, dtypes and order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor

from .formats import get_format
from .layouts import get_layout
from .layouts.scales import stored_shape
from .remember import remembered

if TYPE_CHECKING:
    from .tensor import ScaledTensor

__all__ = [
    "StoredParts",
    "check_parts",
    "is_per_group",
    "is_per_matrix",
    "stored_parts",
    "strides_like",
]


class StoredParts(NamedTuple):
    """Shapes and dtypes of the parts of a ScaledTensor."""

    data: tuple[tuple[int, ...], ...]  # any of these: groups may be moved apart, or not
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
    if layout != "compact" and len(shape) != 2:
        raise ValueError(
            f"layout: {layout!r} stores the scales of one matrix; with leading dimensions, scales "
            "are compact"
        )
    k_groups = groups if groups is not None and k_grouped else 0
    scale = fmt.scale_shape(shape, axis, k_groups)
    if layout != "compact":
        matrix = (scale[0], scale[1]) if axis == -1 else (scale[1], scale[0])
        scale = stored_shape(where, matrix, None if k_grouped else groups)
    dtype = where.stored_dtype(fmt.scale.dtype)
    ways = (False, True) if k_groups else (False,)
    return StoredParts(
        tuple(fmt.data_shape(shape, axis, k_groups, apart) for apart in ways),
        fmt.element.dtype,
        scale,
        (dtype, torch.uint8) if dtype.itemsize == 1 else (dtype,),
    )


def is_per_matrix(global_scale: Tensor | None, shape: Sequence[int]) -> TypeGuard[Tensor]:
    """Whether each matrix of a batch of ``shape`` has a global scale of its own. One for one matrix
    is a scalar, whatever its shape."""
    lead = tuple(shape[:-2])
    if global_scale is None or not lead or global_scale.numel() == 1:
        return False
    return tuple(global_scale.shape) == lead


def is_per_group(global_scale: Tensor | None) -> TypeGuard[Tensor]:
    """Whether a product is multiplied by one for each of its groups: of a batch, or of rows that
    are equal groups."""
    return global_scale is not None and global_scale.numel() > 1


def _fits(global_scale: Tensor, shape: tuple[int, ...]) -> bool:
    return global_scale.numel() == 1 or is_per_matrix(global_scale, shape)


def strides_like(shape: Sequence[int], data: Tensor) -> list[int] | None:
    """Strides of a dense tensor whose fastest dimension is that of the data; None: the last."""
    if len(shape) < 2 or data.stride(-1) == 1 or data.stride(-2) != 1:
        return None
    strides, step = [0] * len(shape), 1
    for dim in (len(shape) - 2, len(shape) - 1, *reversed(range(len(shape) - 2))):
        strides[dim] = step
        step = step * shape[dim]
    return strides


def check_parts(q: ScaledTensor, shape: tuple[int, ...], scale_dtype: torch.dtype) -> None:
    """ValueError unless the parts of ``q`` fit what it says of itself."""
    name, data, scale = q.format_name, q.qdata, q.qscale
    scalar, offsets = q.global_scale, q.offsets
    groups = None if offsets is None else offsets.shape[0]
    want = stored_parts(name, q.layout_name, shape, q.axis, groups, q.k_grouped, scalar is not None)
    if scalar is not None and (scalar.dtype != torch.float32 or not _fits(scalar, shape)):
        each = f", or {shape[:-2]}, one for each matrix" if len(shape) > 2 else ""
        raise ValueError(
            f"global_scale: got {tuple(scalar.shape)} {scalar.dtype}; expected an fp32 scalar{each}"
        )
    if data.shape not in want.data or data.dtype != want.data_dtype:
        raise ValueError(
            f"data: got {tuple(data.shape)} {data.dtype}; {name!r} stores "
            f"{shape} along axis {q.axis} as {' or '.join(map(str, want.data))} {want.data_dtype}"
        )
    if scale.shape != want.scale or scale_dtype not in want.scale_dtypes:
        raise ValueError(
            f"scale: got {tuple(scale.shape)} {scale_dtype}; {name!r} in layout "
            f"{q.layout_name!r} for {shape} along axis {q.axis} is {want.scale} "
            f"{' or '.join(map(str, want.scale_dtypes))}"
        )
    device = data.device
    for part, tensor in (("scale", scale), ("global_scale", scalar), ("offsets", offsets)):
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{part}: is on {tensor.device}, data on {device}; move it there")
