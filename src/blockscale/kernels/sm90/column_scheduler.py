# mypy: ignore-errors
"""Which tiles of a product whose B is widened a CTA takes.

As ``dense_scheduler``, but for CTAs of a cluster that share a tile, each with a part of K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from ..common.persistent import cluster_id_and_count
from ..common.schedule import Raster
from .dense_scheduler import Tile
from .mixed_config import B_ROWS, SUPERGROUP, Config
from .stream_scheduler import StreamTiles

__all__ = ["ColumnScheduler", "ColumnTiles"]


@dataclass(frozen=True)
class ColumnTiles:
    """The tiles of a CTA: every so many-th of ``count``.

    Attributes:
        tiles: across the output, and down.
        last_column, last_row: where the last tiles begin, if they reach back into those before them
            rather than out of the matrix, as those of ``dense_scheduler`` do.
    """

    config: Config
    tiles: tuple
    last_column: Any
    last_row: Any
    k_begin: Any
    k_end: Any

    @property
    def count(self):
        return self.tiles[0] * self.tiles[1]

    def first(self):
        """The CTA's first one, and how far its others are apart."""
        return cluster_id_and_count(self.config.split_k)

    def k_blocks(self, index):
        """Those of ``tile(index)``, without its divisions."""
        return self.k_end - self.k_begin

    def tile(self, index) -> Tile:
        """Divisions: not for each K block. Neighbours share rows of A, which are more bytes."""
        raster = Raster((B_ROWS, self.config.rows), (1, 1), SUPERGROUP)
        column, row = raster.tile(index, self.tiles, Int32(0))
        if self.last_column is not None:
            column = cutlass.min(column, self.last_column)
        if self.last_row is not None:
            row = cutlass.min(row, self.last_row)
        return Tile(row, column, self.k_begin, self.k_end, a_row=row, b_row=column)


@dataclass(frozen=True)
class ColumnScheduler:
    config: Config

    def extent(self, a, b) -> tuple:
        """On the host: rows of B and of A."""
        return Int32(b.shape[0]), Int32(a.shape[0])

    def tiles_of(self, extent) -> tuple:
        n, m = extent
        return cute.ceil_div(n, B_ROWS), cute.ceil_div(m, self.config.rows)

    def grid(self, extent, multiprocessors, groups=None):
        """On the host: how many CTAs there are."""
        if self.config.stream_k:
            return multiprocessors
        across, down = self.tiles_of(extent)
        return (
            cutlass.min(across * down, multiprocessors // self.config.split_k) * self.config.split_k
        )

    def tiles(
        self, extent, k_blocks, rank, k_part, groups=None, ring=None
    ) -> ColumnTiles | StreamTiles:
        """On the device: those of a CTA that has the ``k_part``-th part of K."""
        config, (n, m) = self.config, extent
        k_begin, k_end = (each * k_blocks // config.split_k for each in (k_part, k_part + 1))
        # What is stored twice would be added twice; and has to be the same, while the order of sums
        # depends on a tile's warpgroups, and on its columns where CTAs split K.
        last_column = last_row = None
        if not config.accumulate and config.sources == 1 and not config.stream_k:
            last_column = cutlass.max(n - B_ROWS, Int32(0))
        if not config.accumulate and config.warpgroup_split_k == 1 and not config.stream_k:
            last_row = cutlass.max(m - config.rows, Int32(0))
        tiles = ColumnTiles(config, self.tiles_of(extent), last_column, last_row, k_begin, k_end)
        return StreamTiles.of(tiles) if config.stream_k else tiles
