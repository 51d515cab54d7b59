# mypy: ignore-errors
"""Stream-K: tiles of which CTAs take equal shares, however few they are (Osama et al., 2023).

All CTAs have the same number of K blocks of the first tiles, so that none waits where tiles are no
multiple of CTAs: a CTA ends one tile, and begins another. What begins a tile adds up the
accumulators of all who have a part of it. Of tiles that are more than twice as many as CTAs, the
others are taken whole, after these.

A CTA that begins a tile waits for those with the next K blocks, whose ``block_idx`` is less: they
were started before it, and wait for nobody before they have sent theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from .dense_scheduler import Tile

__all__ = ["StreamTiles"]


@dataclass(frozen=True)
class StreamTiles:
    """The tiles of a CTA, in whole or in part.

    Attributes:
        whole: all tiles, whose K is not split.
        k_blocks_of_tile: of K.
        cta, ctas: this one, and how many there are.
        split: tiles of which all CTAs have the same number of K blocks.
        begin, end: those of this one, counted through all of these tiles.
    """

    whole: Any
    k_blocks_of_tile: Any
    cta: Any
    ctas: Any
    split: Any
    begin: Any
    end: Any

    @classmethod
    def of(cls, whole) -> StreamTiles:
        """``whole``: the tiles as ``ColumnTiles``."""
        ctas = Int32(cute.arch.grid_dim()[0])
        cta = ctas - 1 - cute.arch.block_idx()[0]
        k_blocks = Int32(whole.k_end)
        split = whole.count - cutlass.max(whole.count // ctas - 1, Int32(0)) * ctas
        begin, end = (each * (split * k_blocks) // ctas for each in (cta, cta + 1))
        return cls(whole, k_blocks, cta, ctas, split, begin, end)

    @property
    def parts(self):
        """Tiles of which this CTA has a part, or all."""
        return (self.end - 1) // self.k_blocks_of_tile - self.begin // self.k_blocks_of_tile + 1

    @property
    def count(self):
        return self.parts + (self.whole.count - self.split) // self.ctas

    def first(self):
        """The CTA's first one, and how far its others are apart."""
        return Int32(0), Int32(1)

    def _number(self, index):
        """Which of all tiles it is."""
        others = self.split + (index - self.parts) * self.ctas + self.cta
        first = self.begin // self.k_blocks_of_tile
        return cutlass.select_(index < self.parts, first + index, others)

    def tile(self, index) -> Tile:
        number, blocks = self._number(index), self.k_blocks_of_tile
        tile = self.whole.tile(number)
        begin = cutlass.max(self.begin - number * blocks, Int32(0))
        end = cutlass.min(self.end - number * blocks, blocks)
        shared = index < self.parts
        return Tile(
            tile.row,
            tile.column,
            cutlass.select_(shared, begin, Int32(0)),
            cutlass.select_(shared, end, blocks),
            a_row=tile.a_row,
            b_row=tile.b_row,
        )

    def k_blocks(self, index):
        return self.tile(index).k_blocks

    def last(self, index):
        """The CTA that has the last K block of ``tile(index)``."""
        blocks = (self._number(index) + 1) * self.k_blocks_of_tile
        last = (blocks * self.ctas - 1) // (self.split * self.k_blocks_of_tile)
        return cutlass.select_(index < self.parts, last, self.cta)
