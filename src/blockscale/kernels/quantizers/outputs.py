"""What a call of a kernel allocates, and the shapes in which it returns it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...formats import Format
from ...layouts import get_layout
from ..common.template import template
from .output_shapes import output_shapes

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
    shapes = output_shapes(shape, format, axis, layout, groups, k_major, batched)
    kept = torch.uint8 if format.scale.nbytes == 1 else format.scale.dtype
    return Output(
        first=2 * (axis == -2),
        data=template(shapes.lines, format.element.dtype, device),
        data_shape=shapes.data,
        scale=template(shapes.flat, get_layout(layout).stored_dtype(kept), device),
        scale_shape=shapes.scale,
        turned=shapes.turned,
    )
