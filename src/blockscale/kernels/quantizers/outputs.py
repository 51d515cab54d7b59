"""What a call of a kernel allocates, and the shapes in which it returns it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...formats import Format
from ...layouts import get_layout
from ...layouts.scales import stored_shape
from ..common.template import template

__all__ = ["Output", "choose_output"]


@dataclass(frozen=True, slots=True)
class Output:
    """Data and scales along one axis.

    ``data`` and ``scale`` are templates. ``first`` is the position of ``data`` among the kernel's
    arguments.
    """

    first: int
    data: Tensor  # as a matrix
    data_shape: tuple[int, ...]
    scale: Tensor
    scale_shape: tuple[int, ...]
    turned: bool  # data is stored column by column

    def shaped(self, data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        data = data.mT if self.turned else data
        if len(self.data_shape) != 2:
            data, scale = data.view(self.data_shape), scale.view(self.scale_shape)
        return data, scale


def choose_output(
    shape: tuple[int, ...],
    format: Format,
    axis: int,
    layout: str,
    device: torch.device,
    groups: int | None,
    k_major: bool = False,
    batched: bool = False,
) -> Output:
    """What becomes of a tensor of ``shape``; ``groups``: whose rows are so many experts';
    ``k_major``: as :func:`blockscale.quantize` takes it; ``batched``: matrix by matrix.
    """
    k_groups = groups if groups is not None and axis == -2 else 0
    data = format.data_shape(shape, axis, k_groups, k_major)
    scale = format.scale_shape(shape, axis, k_groups)
    outer = (scale[0], scale[-1]) if axis == -1 else (scale[-1], scale[0])
    where, kept = get_layout(layout), format.scale.dtype
    kept = torch.uint8 if format.scale.nbytes == 1 else kept
    stored: tuple[int, ...] = scale
    if layout != "compact":
        stored = stored_shape(where, outer, groups if axis == -1 else None)
    turned = format.turned(axis, k_major)
    flat, lines = stored, data
    if batched:
        count = math.prod(shape[:-2])
        flat, lines = (count, *scale[-2:]), (count, *data[-2:])
    elif len(shape) != 2:
        flat, lines = (_flat(each) for each in (scale, data))
    lines = (*lines[:-2], *lines[:-3:-1]) if turned else lines
    return Output(
        first=2 * (axis == -2),
        data=template(lines, format.element.dtype, device),
        data_shape=data,
        scale=template(flat, where.stored_dtype(kept), device),
        scale_shape=stored,
        turned=turned,
    )


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """All dimensions but the last taken as one."""
    return math.prod(shape[:-1]), shape[-1]
