"""A quantized matrix, by its parts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...formats import Format

__all__ = ["Matrix"]


class Matrix(NamedTuple):
    """A quantized matrix.

    Attributes:
        data: bytes of elements, as ``ScaledTensor.qdata`` or, if ``turned``, its transpose.
        scale: as ``layout`` stores it.
        axis: that blocks run along.
    """

    format: Format
    shape: tuple[int, int]
    axis: int
    layout: str
    data: Tensor
    scale: Tensor
    global_scale: Tensor | None
    turned: bool = False
