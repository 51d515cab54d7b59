# mypy: ignore-errors
"""Which tiles a CTA takes of products whose columns are grouped: each group has an output of its
own, and these lie one below the other."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from ...formats import GROUP_TILE
from .dense_scheduler import Tile
from .grouped_scheduler import GroupedTiles

__all__ = ["KGroupedTiles"]


@dataclass(frozen=True)
class KGroupedTiles(GroupedTiles):
    """Those of groups that are moved apart in A and B, as ``formats.padded_groups`` says.

    Attributes:
        extent: rows of all outputs, and columns.
        skips_empty: groups without columns have no tiles, as nothing is to be added to theirs.
    """

    skips_empty: bool = False

    @property
    def grouped(self):
        """What groups are of: as many columns as there may be, without room between groups."""
        return (self.k_blocks_of_tile - self.groups + 1) * GROUP_TILE - 1

    @property
    def rows(self):
        """Of the output of a group."""
        return self.extent[0] // self.groups

    @property
    def down_each(self):
        """Clusters down a group."""
        return Int32(cute.ceil_div(self.rows, self.shape[0] * self.cluster[0]))

    def down_of(self, chunk, begin, end):
        down = self.down_each
        if self.skips_empty:
            down = Int32(cutlass.select_(end > begin, down, Int32(0)))
        return Int32(cutlass.select_(chunk + cute.arch.lane_idx() < self.groups, down, Int32(0)))

    def found(self, index, group, after, begin, end) -> tuple:
        first = after - self.down_each
        row, column = self.place(index - first * self.across, self.down_each)
        place = row // self.shape[0] | column // self.shape[1] << 16
        k_begin = begin // GROUP_TILE + group
        return place, group, k_begin, k_begin + cute.ceil_div(end - begin, GROUP_TILE)

    def tile(self, index) -> Tile:
        place, group, k_begin, k_end = self.ring.read(self.turn(index))
        row, column = (place & 0xFFFF) * self.shape[0], (place >> 16) * self.shape[1]
        first, end = group * self.rows, (group + 1) * self.rows
        return Tile(first + row, column, k_begin, k_end, end, None, row, column)
