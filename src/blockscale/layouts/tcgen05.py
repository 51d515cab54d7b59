"""The 128x4 tiles that Blackwell's block-scaled tensor cores read.

Sources: cuBLAS, "1D block scaling factors layout" (``TILE_ROWS``, ``TILE_BLOCKS`` and the
formula); PTX ISA, tcgen05 scale factor layouts. ``torchao.to_blocked`` gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Layout

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
    pad: ClassVar[tuple[int, int]] = (TILE_ROWS, TILE_BLOCKS)
    rows: ClassVar[tuple[int, ...]] = (4, 32)
    blocks: ClassVar[tuple[int, ...]] = (TILE_BLOCKS,)
    swapped: ClassVar[tuple[int, int]] = (1, 3)
    flat: ClassVar[bool] = True
    sentence: ClassVar[str] = (
        "128x4 tiles of 512 bytes, K tile inner, rows 32 apart interleaved, zero-padded"
    )
