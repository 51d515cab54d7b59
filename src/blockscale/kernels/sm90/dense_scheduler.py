# mypy: ignore-errors
"""Which tiles of a dense product a CTA takes: persistent clusters, every so many-th tile each.

A scheduler is what a kernel asks for its grid, on the host, and for a CTA's tiles, on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from ..common.persistent import cluster_id_and_count
from ..common.schedule import Raster, clusters_of
from .product_config import GROUP, WIDE, WIDE_GROUP, ProductConfig

__all__ = ["DenseScheduler", "DenseTiles", "Tile"]


_ALIGNMENT = 8  # rows: TMA loads scales of A, and columns of bf16, from multiples of 16 bytes on


@dataclass(frozen=True)
class Tile:
    """A CTA's part of the output, and of K.

    Attributes:
        row, column: the first ones, of the output.
        k_begin, k_end: its K blocks.
        end: the row before which it ends, if not where the output does.
        group: whose rows these are, if rows are grouped.
        a_row, b_row: the first ones of A and of B, which has those of all groups one after another.
    """

    row: Any
    column: Any
    k_begin: Any
    k_end: Any
    end: Any = None
    group: Any = None
    a_row: Any = None
    b_row: Any = None

    @property
    def k_blocks(self):
        return self.k_end - self.k_begin


@dataclass(frozen=True)
class DenseTiles:
    """The tiles of a CTA: every so many-th of ``count``.

    Attributes:
        clusters: of tiles, down and across the output.
        rank: of the CTA among those that share tiles of A or B.
        last_row: where the last tiles begin, or None. They reach up into those before them rather
            than below the matrix: TMA fills rows that are not there with zeros, which takes longer
            than to load some. What two CTAs store is the same.
        k_begin, k_end: of all of its tiles.
    """

    raster: Raster
    cluster_size: int
    clusters: tuple
    rank: Any
    last_row: Any
    k_begin: Any
    k_end: Any

    @property
    def count(self):
        return self.clusters[0] * self.clusters[1]

    def first(self):
        """The CTA's first one, and how far its others are apart."""
        return cluster_id_and_count(self.cluster_size)

    def tile(self, index) -> Tile:
        row, column = self.raster.tile(index, self.clusters, self.rank)
        if self.last_row is not None:
            row = cutlass.min(row, self.last_row)
        return Tile(row, column, self.k_begin, self.k_end, a_row=row, b_row=column)


class DenseScheduler:
    """All tiles of a matrix (M, N), in the order of a :class:`Raster`."""

    def __init__(self, config: ProductConfig):
        self.config = config

    def clusters(self, d, groups=None):
        """How many clusters of tiles there are, down and across."""
        return clusters_of(self.config.tile, self.config.cluster, *d.shape)

    def grid(self, d, multiprocessors, groups=None):
        """On the host: how many CTAs there are."""
        size = self.config.cluster_size
        down, across = self.clusters(d, groups)
        return cutlass.min(down * across, multiprocessors // size) * size

    def tiles(self, d, k_blocks, rank, k_part, groups=None, ring=None) -> DenseTiles:
        """On the device: those of a CTA that has the ``k_part``-th part of K."""
        config, split = self.config, self.config.split_k
        clusters = self.clusters(d, groups)
        # as ``config.group``
        group = cutlass.select_(clusters[1] < WIDE, Int32(GROUP), Int32(WIDE_GROUP))
        begin, end = 0, k_blocks
        if split > 1:
            begin, end = k_part * k_blocks // split, (k_part + 1) * k_blocks // split
        last_row = None
        if not config.accumulate:  # what is stored twice would be added twice
            least = cutlass.max(Int32(d.shape[0]) - config.tile[0], Int32(0))
            last_row = cute.round_up(least, _ALIGNMENT)
        raster = Raster(config.tile, config.cluster, group)
        return DenseTiles(raster, config.cluster_size, clusters, rank, last_row, begin, end)
