# mypy: ignore-errors
"""Which tiles a CTA takes, and in what order.

Clusters stay, and take every so many-th tile of a raster that goes down ``group`` tiles along M
before it moves along N: what runs at once shares rows of A and of B in the L2 cache.
"""

from __future__ import annotations

from cutlass import Int32, cute
from cutlass import min as least

__all__ = ["Raster", "clusters_of"]


def clusters_of(tile: tuple[int, int], cluster: tuple[int, int], m, n):
    """Clusters of tiles down and across a matrix (M, N)."""
    down, across = (cute.ceil_div(x, t * c) for x, t, c in zip((m, n), tile, cluster, strict=True))
    return Int32(down), Int32(across)


class Raster:
    """The order of tiles of ``tile`` (rows, columns), taken by clusters of ``cluster`` CTAs down
    and across, ``group`` clusters down before the next ones across."""

    def __init__(self, tile: tuple[int, int], cluster: tuple[int, int], group: int):
        self.tile_shape, self.cluster, self.group = tile, cluster, group

    def clusters(self, m, n):
        """Clusters of tiles down and across a matrix."""
        return clusters_of(self.tile_shape, self.cluster, m, n)

    def tile(self, index, clusters, rank):
        """First row and column of the tile of block ``rank`` in the ``index``-th cluster."""
        down, across = clusters
        band = index // (self.group * across)
        first = band * self.group
        height = least(Int32(self.group), down - first)
        within = index - first * across
        row = (first + within % height) * self.cluster[0]
        column = within // height * self.cluster[1]
        if self.cluster[1] > 1:
            column = column + (rank if self.cluster[0] == 1 else rank // self.cluster[0])
        if self.cluster[0] > 1:
            row = row + (rank if self.cluster[1] == 1 else rank % self.cluster[0])
        return row * self.tile_shape[0], column * self.tile_shape[1]
