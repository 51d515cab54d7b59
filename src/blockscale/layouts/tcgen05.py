"""The 128x4 tiles that Blackwell's block-scaled tensor cores read.

Sources: cuBLAS, "1D block scaling factors layout" (``TILE_ROWS``, ``TILE_BLOCKS`` and the
formula); PTX ISA, tcgen05 scale factor layouts. ``torchao.to_blocked`` gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Layout, as_bytes, ceil_to, check_scale

__all__ = ["TILE_BLOCKS", "TILE_BYTES", "TILE_ROWS", "Tcgen05"]

TILE_ROWS = 128
"""Rows of scales in a tile."""
TILE_BLOCKS = 4
"""Scales of a row in a tile: blocks along the contraction."""
TILE_BYTES = TILE_ROWS * TILE_BLOCKS
"""Of a tile."""


@dataclass(frozen=True)
class Tcgen05(Layout):
    """Tiles of 128 rows x 4 blocks, 512 bytes each, K tile inner, zero-padded to full tiles.

    Inside a tile: ``(row % 32) * 16 + (row // 32) * 4 + block``, so that rows r, r+32, r+64, r+96
    share 16 bytes: the 32 lanes of a tcgen05.cp.32x128b copy. Starts 16-byte aligned. Immutable
    under transposition: the tiles of ``q.mT`` are those of ``q``.
    """

    name: ClassVar[str] = "tcgen05"
    itemsize: ClassVar[tuple[int, ...]] = (1,)

    def swizzle(self, scale: Tensor) -> Tensor:
        check_scale(self, scale)
        rows, blocks = scale.shape
        padded = torch.nn.functional.pad(
            as_bytes(scale), (0, -blocks % TILE_BLOCKS, 0, -rows % TILE_ROWS)
        )
        tiles = padded.reshape(-(-rows // TILE_ROWS), 4, 32, -(-blocks // TILE_BLOCKS), TILE_BLOCKS)
        return tiles.permute(0, 3, 2, 1, 4).contiguous().flatten().view(scale.dtype)

    def unswizzle(self, stored: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        self._check_stored(stored, shape, dtype)
        rows, blocks = shape
        tiles = as_bytes(stored).reshape(
            -(-rows // TILE_ROWS), -(-blocks // TILE_BLOCKS), 32, 4, TILE_BLOCKS
        )
        matrix = tiles.permute(0, 3, 2, 1, 4).reshape(
            ceil_to(rows, TILE_ROWS), ceil_to(blocks, TILE_BLOCKS)
        )
        return matrix[:rows, :blocks].contiguous().view(dtype)

    def stored_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        return (ceil_to(shape[0], TILE_ROWS) * ceil_to(shape[1], TILE_BLOCKS),)

    def nbytes(self, shape: tuple[int, int], itemsize: int | None = None) -> int:
        return self.stored_shape(shape)[0]

    def offset(
        self, row: int, block: int, shape: tuple[int, int], itemsize: int | None = None
    ) -> int:
        k_tiles = -(-shape[1] // TILE_BLOCKS)
        tile = row // TILE_ROWS * k_tiles + block // TILE_BLOCKS
        within = row % 32 * 16 + row % TILE_ROWS // 32 * 4 + block % TILE_BLOCKS
        return tile * TILE_BYTES + within

    def describe(self) -> str:
        return "128x4 tiles of 512 bytes, K tile inner, rows 32 apart interleaved, zero-padded"
