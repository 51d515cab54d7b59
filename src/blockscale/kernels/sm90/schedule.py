# mypy: ignore-errors
"""Which tiles a block of threads takes, and in what order.

Clusters stay, and take every so many-th tile of a raster that goes down ``group`` tiles along M
before it moves along N: what runs at once shares rows of A and of B in the L2 cache.
"""

from __future__ import annotations

from cutlass import Int32, cute
from cutlass import min as least

from .config import Config

__all__ = ["Raster"]


class Raster:
    """The order of tiles, for a :class:`Config`."""

    def __init__(self, config: Config):
        self.config = config

    def clusters(self, m, n):
        """Clusters of tiles down and across a matrix."""
        config = self.config
        down = cute.ceil_div(m, config.tile[0] * config.cluster[0])
        across = cute.ceil_div(n, config.tile[1] * config.cluster[1])
        return Int32(down), Int32(across)

    def tile(self, index, clusters, rank):
        """First row and column of the tile of block ``rank`` in the ``index``-th cluster."""
        config, (down, across) = self.config, clusters
        band = index // (config.group * across)
        first = band * config.group
        height = least(Int32(config.group), down - first)
        within = index - first * across
        row = (first + within % height) * config.cluster[0]
        column = within // height * config.cluster[1]
        if config.cluster[0] > 1:
            row = row + rank
        if config.cluster[1] > 1:
            column = column + rank
        return row * config.tile[0], column * config.tile[1]
