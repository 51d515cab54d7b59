"""A quantized matrix, by its parts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...formats import Format

__all__ = ["Matrix", "lies_together"]


class Matrix(NamedTuple):
    """A quantized matrix.

    Attributes:
        shape: (M, K) of what was quantized.
        data: uint8, bytes of elements, as ``ScaledTensor.qdata`` or, if ``turned``, its transpose.
        scale: as ``layout`` stores it, one-byte floats as uint8.
        axis: that blocks run along: -1 or -2.
        global_scale: () fp32, of formats that have one.
    """

    format: Format
    shape: tuple[int, int]
    axis: int
    layout: str
    data: Tensor
    scale: Tensor
    global_scale: Tensor | None
    turned: bool = False


def lies_together(x: Tensor) -> bool:
    """Whether nothing lies between the elements of a matrix, in one order or the other."""
    return x.is_contiguous() or x.mT.is_contiguous()
