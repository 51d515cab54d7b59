"""Row-major scales: how they travel (checkpoints, collectives) and what layouts start from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Layout, check_scale

__all__ = ["Compact"]


@dataclass(frozen=True)
class Compact(Layout):
    """Scale (row, block) is item ``row * blocks + block``; nothing is padded."""

    name: ClassVar[str] = "compact"
    itemsize: ClassVar[tuple[int, ...]] = (1, 4)

    def swizzle(self, scale: Tensor) -> Tensor:
        check_scale(self, scale)
        return scale.contiguous()

    def unswizzle(self, stored: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        self._check_stored(stored, shape, dtype)
        return stored

    def stored_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        return tuple(shape)

    def nbytes(self, shape: tuple[int, int], itemsize: int | None = None) -> int:
        return shape[0] * shape[1] * (itemsize or 1)

    def offset(
        self, row: int, block: int, shape: tuple[int, int], itemsize: int | None = None
    ) -> int:
        return (row * shape[1] + block) * (itemsize or 1)

    def describe(self) -> str:
        return "row-major, one scale a block, no padding"
