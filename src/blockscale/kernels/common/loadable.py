"""Matrices as TMA loads them."""

from __future__ import annotations

from torch import Tensor

__all__ = ["loadable"]


def loadable(x: Tensor, apart: int = 16) -> Tensor:
    """``x``, or a copy, whose rows (columns, where these lie together) are contiguous and start at
    multiples of ``apart`` bytes."""
    if x.stride(1) != 1:
        together = x.stride(0) == 1
        return loadable(x.mT, apart).mT if together else loadable(x.contiguous(), apart)
    size = x.element_size()
    if not (x.data_ptr() % apart or x.stride(0) * size % apart):
        return x
    rows, columns = x.shape
    step = -(-columns * size // apart) * apart // size
    return x.new_empty(rows, step)[:, :columns].copy_(x)
