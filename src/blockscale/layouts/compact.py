"""Row-major scales: how they travel (checkpoints, collectives) and what layouts start from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..arrays import Array, row_major
from .base import Layout, check_scale

__all__ = ["Compact"]


@dataclass(frozen=True)
class Compact(Layout):
    """Scale (row, block) is item ``row * blocks + block``; nothing is padded."""

    name: ClassVar[str] = "compact"
    itemsize: ClassVar[tuple[int, ...]] = (1, 4)
    spreads: ClassVar[bool] = False
    sentence: ClassVar[str] = "row-major, one scale a block, no padding"

    def swizzle(self, scale: Array) -> Array:
        check_scale(self, scale)
        return row_major(scale)

    def unswizzle(self, stored: Array, shape: tuple[int, int], dtype: Any) -> Array:
        self._check_stored(stored, shape, dtype)
        return stored
