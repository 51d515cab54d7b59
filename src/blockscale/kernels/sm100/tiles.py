# mypy: ignore-errors
"""What a CTA computes at once, and where the tiles of a matrix are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..common.schedule import Raster

__all__ = ["DenseTiles", "Tile"]


@dataclass(frozen=True)
class Tile:
    """A CTA's part of the output, and what of A and B it is the product of.

    Attributes:
        row, column: the first ones, of the output.
        starts: the first rows of A and of B.
        scale_starts: the first tiles of scales, down A and down B.
        k_blocks: how many there are along K.
        k_begin, k_end: the part of K, in tiles of 128, where columns are grouped.
        end: the row of the output before which it ends, if not where the output does.
        group: whose it is, if there are any.
    """

    row: Any
    column: Any
    starts: tuple
    scale_starts: tuple
    k_blocks: Any
    k_begin: Any = None
    k_end: Any = None
    end: Any = None
    group: Any = None


@dataclass(frozen=True)
class DenseTiles:
    """The tiles of a product without groups.

    Attributes:
        clusters: of tiles, down and across the output.
        rank: of the CTA in its cluster.
    """

    raster: Raster
    clusters: tuple
    rank: Any
    k_blocks: Any

    def tile(self, index) -> Tile:
        """The CTA's, of a cluster's."""
        row, column = self.raster.tile(index, self.clusters, self.rank)
        scale_starts = row // 128, column // 128
        return Tile(row, column, (row, column), scale_starts, self.k_blocks)
