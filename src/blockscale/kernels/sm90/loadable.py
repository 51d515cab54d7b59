"""Matrices as TMA loads them."""

from __future__ import annotations

from torch import Tensor

__all__ = ["loadable"]


def loadable(x: Tensor) -> Tensor:
    """``x``, or a copy, whose rows (columns, where these lie together) are contiguous and start at
    multiples of 16 bytes."""
    if x.stride(1) != 1:
        return loadable(x.mT).mT if x.stride(0) == 1 else loadable(x.contiguous())
    size = x.element_size()
    if not (x.data_ptr() % 16 or x.stride(0) * size % 16):
        return x
    rows, columns = x.shape
    apart = -(-columns * size // 16) * 16 // size
    return x.new_empty(rows, apart)[:, :columns].copy_(x)
