# mypy: ignore-errors
"""Which tiles of a product of few rows a CTA takes: all that share rows of B, then the next ones.

As ``dense_scheduler``, but for CTAs of a cluster that share a tile, each with a part of K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from ..common.persistent import cluster_id_and_count
from .dense_scheduler import Tile
from .mixed_config import B_ROWS, Config

__all__ = ["ColumnScheduler", "ColumnTiles"]


@dataclass(frozen=True)
class ColumnTiles:
    """The tiles of a CTA: every so many-th of ``count``, which are ``down`` one above the other."""

    config: Config
    count: Any
    down: Any
    k_begin: Any
    k_end: Any

    def first(self):
        """The CTA's first one, and how far its others are apart."""
        return cluster_id_and_count(self.config.split_k)

    def k_blocks(self, index):
        """Those of ``tile(index)``, without its division."""
        return self.k_end - self.k_begin

    def tile(self, index) -> Tile:
        """A division: not for each K block."""
        row, column = index % self.down * self.config.rows, index // self.down * B_ROWS
        return Tile(row, column, self.k_begin, self.k_end)


@dataclass(frozen=True)
class ColumnScheduler:
    config: Config

    def extent(self, a, b) -> tuple:
        """On the host: how many tiles there are, and how many of them one above the other."""
        down = cute.ceil_div(a.shape[0], self.config.rows)
        return Int32(down * cute.ceil_div(b.shape[0], B_ROWS)), Int32(down)

    def grid(self, extent, multiprocessors):
        """On the host: how many CTAs there are."""
        return cutlass.min(extent[0], multiprocessors // self.config.split_k) * self.config.split_k

    def tiles(self, extent, k_blocks, k_part) -> ColumnTiles:
        """On the device: those of a CTA that has the ``k_part``-th part of K."""
        k_begin, k_end = (each * k_blocks // self.config.split_k for each in (k_part, k_part + 1))
        return ColumnTiles(self.config, *extent, k_begin, k_end)
