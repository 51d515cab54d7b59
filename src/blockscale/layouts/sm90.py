"""Scales as Hopper kernels load them by TMA: MN-major, each K block's column 16-byte aligned.

``Sm90`` holds fp32 scales (FP8 1x128), ``Packed`` four one-byte scales a 32-bit word (DeepGEMM's
packed UE8M0, and UE4M3 as in its NVFP4 path), which Blackwell kernels load the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..dtypes import INT32
from .base import Layout

__all__ = ["Packed", "Sm90"]

_ALIGN = 4  # 32-bit items in the 16 bytes to which TMA wants a stride aligned


@dataclass(frozen=True)
class Sm90(Layout):
    """fp32, stored (blocks, rows padded to 4): scale (row, block) is item block * padded + row."""

    name: ClassVar[str] = "sm90"
    itemsize: ClassVar[tuple[int, ...]] = (4,)
    spreads: ClassVar[bool] = False
    pad: ClassVar[tuple[int, int]] = (_ALIGN, 1)
    swapped: ClassVar[tuple[int, int]] = (0, 1)
    sentence: ClassVar[str] = "fp32, MN-major (one row of the buffer a K block), " + (
        "rows padded to 16 bytes"
    )


@dataclass(frozen=True)
class Packed(Layout):
    """int32, stored (ceil(blocks / 4), rows padded to 4): block 4 w + i is byte i of word w."""

    name: ClassVar[str] = "packed"
    itemsize: ClassVar[tuple[int, ...]] = (1,)
    pad: ClassVar[tuple[int, int]] = (_ALIGN, 4)
    blocks: ClassVar[tuple[int, ...]] = (4,)
    swapped: ClassVar[tuple[int, int]] = (0, 1)
    word: ClassVar[np.dtype | None] = INT32
    sentence: ClassVar[str] = (
        "four one-byte scales an int32 word, MN-major, rows padded to 16 bytes"
    )
