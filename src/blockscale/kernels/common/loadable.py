"""Matrices as TMA loads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["loadable", "rows_to_load"]

_ROWS = (1, 2, 4, *range(8, 256, 8))  # a kernel for each


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


def rows_to_load(m: int, tile: int) -> int:
    """How many of a tile's rows, the first and only one of ``m``, are loaded; 0 for all."""
    return next((rows for rows in _ROWS if m <= rows < tile), 0)
