"""Scales as Hopper kernels load them by TMA: MN-major, each K block's column 16-byte aligned.

``Sm90`` holds fp32 scales (FP8 1x128), ``Packed`` four one-byte scales a 32-bit word (DeepGEMM's
packed UE8M0, and UE4M3 as in its NVFP4 path), which Blackwell kernels load the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Layout, as_bytes, ceil_to, check_scale

__all__ = ["Packed", "Sm90"]

_ALIGN = 4  # 32-bit items in the 16 bytes to which TMA wants a stride aligned


@dataclass(frozen=True)
class Sm90(Layout):
    """fp32, stored (blocks, rows padded to 4): scale (row, block) is item block * padded + row."""

    name: ClassVar[str] = "sm90"
    itemsize: ClassVar[tuple[int, ...]] = (4,)

    def swizzle(self, scale: Tensor) -> Tensor:
        check_scale(self, scale)
        padded = torch.nn.functional.pad(scale, (0, 0, 0, -scale.shape[0] % _ALIGN))
        return padded.mT.clone(memory_format=torch.contiguous_format)

    def unswizzle(self, stored: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        self._check_stored(stored, shape, dtype)
        return stored[:, : shape[0]].mT.clone(memory_format=torch.contiguous_format)

    def stored_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        return (shape[1], ceil_to(shape[0], _ALIGN))

    def nbytes(self, shape: tuple[int, int], itemsize: int | None = None) -> int:
        return 4 * shape[1] * ceil_to(shape[0], _ALIGN)

    def offset(
        self, row: int, block: int, shape: tuple[int, int], itemsize: int | None = None
    ) -> int:
        return 4 * (block * ceil_to(shape[0], _ALIGN) + row)

    def describe(self) -> str:
        return "fp32, MN-major (one row of the buffer a K block), rows padded to 16 bytes"


@dataclass(frozen=True)
class Packed(Layout):
    """int32, stored (ceil(blocks / 4), rows padded to 4): block 4 w + i is byte i of word w."""

    name: ClassVar[str] = "packed"
    itemsize: ClassVar[tuple[int, ...]] = (1,)

    def swizzle(self, scale: Tensor) -> Tensor:
        check_scale(self, scale)
        rows, blocks = scale.shape
        padded = torch.nn.functional.pad(as_bytes(scale), (0, -blocks % 4, 0, -rows % _ALIGN))
        words = padded.flatten().view(torch.int32).reshape(padded.shape[0], padded.shape[1] // 4)
        return words.mT.clone(memory_format=torch.contiguous_format)

    def unswizzle(self, stored: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        self._check_stored(stored, shape, dtype)
        octets = stored.mT.flatten().view(torch.uint8).reshape(stored.shape[1], 4 * stored.shape[0])
        return octets[: shape[0], : shape[1]].contiguous().view(dtype)

    def stored_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        return (-(-shape[1] // 4), ceil_to(shape[0], _ALIGN))

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.int32

    def nbytes(self, shape: tuple[int, int], itemsize: int | None = None) -> int:
        return ceil_to(shape[1], 4) * ceil_to(shape[0], _ALIGN)

    def offset(
        self, row: int, block: int, shape: tuple[int, int], itemsize: int | None = None
    ) -> int:
        return 4 * (block // 4 * ceil_to(shape[0], _ALIGN) + row) + block % 4

    def describe(self) -> str:
        return "four one-byte scales an int32 word, MN-major, rows padded to 16 bytes"
