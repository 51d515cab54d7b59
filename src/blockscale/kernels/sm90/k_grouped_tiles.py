# mypy: ignore-errors
"""Which tiles a CTA takes of products whose columns are grouped."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.grouped_tiles import ColumnGroups
from .dense_scheduler import Tile
from .grouped_scheduler import GroupedTiles

__all__ = ["KGroupedTiles"]


@dataclass(frozen=True, kw_only=True)
class KGroupedTiles(ColumnGroups, GroupedTiles):
    """The tiles of a CTA, as of ``GroupedTiles``.

    Attributes:
        blocks: of K, in ``GROUP_TILE`` columns.
    """

    blocks: int = 1

    @property
    def k_tiles(self):
        return self.k_blocks_of_tile // self.blocks

    def found(self, index, group, after, begin, end) -> tuple:
        row, column, *k = self.part(index, group, after, begin, end)
        return row // self.shape[0] | column // self.shape[1] << 16, group, *k

    def tile(self, index) -> Tile:
        place, group, k_begin, k_end = self.ring.read(self.turn(index))
        row, column = (place & 0xFFFF) * self.shape[0], (place >> 16) * self.shape[1]
        first, end = group * self.rows, (group + 1) * self.rows
        part = k_begin * self.blocks, k_end * self.blocks
        return Tile(first + row, column, *part, end, group, row, column)
