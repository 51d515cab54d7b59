# mypy: ignore-errors
"""Which tiles a cluster takes of a product of groups, whose ends the device alone knows.

The grid has clusters for as many tiles as there may be, of which cluster launch control gives the
numbers. In each CTA a warp finds where the tiles of these numbers are, and passes them on by a ring
in shared memory; those beyond the last tile are left out.

Tiles begin where groups do, as tiles of their scales do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from ...formats import GROUP_TILE
from ..common.grouped_tiles import ColumnGroups, RowGroups
from ..common.tile_ring import NONE, TileRing
from .clc_scheduler import ClcPipeline
from .config import TILE_M, Config
from .tiles import Tile

__all__ = ["GroupFinder", "GroupedTiles", "KGroupedTiles", "TilePipeline", "most_clusters"]


@dataclass(frozen=True, kw_only=True)
class GroupedTiles(RowGroups):
    """The tiles of groups of rows. A ring has four integers of each: row, column and group, the
    first tile of A's scales, and the row before which it ends.

    Attributes:
        k_blocks: along K.
        block_k: the elements of a row in one.
        b_halves: of the rows of B of a group, as of ``Config``.
    """

    k_blocks: Any
    block_k: int
    b_halves: int = 1

    def counts(self, chunk, begin, end) -> tuple:
        """Of a lane's group: clusters down it, and tiles of A's scales."""
        down = self.down_of(chunk, begin, end)
        return down, down if self.cluster[0] == 1 else cute.ceil_div(end - begin, TILE_M)

    def found(self, index, group, begin, end, sums) -> list:
        """What the ring has of the CTA's part of the ``index``-th cluster of all."""
        down = cute.ceil_div(end - begin, self.shape[0] * self.cluster[0])
        row, column = self.place(index - (sums[0] - down) * self.across, down)
        scales = group * cute.ceil_div(self.capacity, TILE_M)
        if not self.masked:
            scales = sums[1] - cute.ceil_div(end - begin, TILE_M)
        return [begin + row, self.packed(column, group), scales + row // TILE_M, end]

    def packed(self, column, group):
        """Both in an integer: ``MOST_GROUPS`` at most, and the rest."""
        return column // self.shape[1] << 16 | group

    def unpacked(self, word) -> tuple:
        """The column and the group."""
        return (word >> 16) * self.shape[1], word & 0xFFFF

    def tile(self, words) -> Tile:
        """Of what the ring has. The rest is no product."""
        row, word, scales, end = words
        column, group = self.unpacked(word)
        # none of the rest; with a selection here CuTe DSL 4.8 crashes
        k_blocks = cutlass.min((self.groups - group) * self.k_blocks, self.k_blocks)
        halves = group * self.b_halves
        b_scales = halves * cute.ceil_div(self.extent[1], TILE_M) + column // TILE_M
        starts = row, halves * self.extent[1] + column
        return Tile(row, column, starts, (scales, b_scales), k_blocks, end=end, group=group)


@dataclass(frozen=True, kw_only=True)
class KGroupedTiles(ColumnGroups, GroupedTiles):
    """The tiles of groups of columns. A ring has four integers of each: row in the group, column
    and group, and the part of K."""

    @property
    def k_tiles(self):
        return self.k_blocks * (self.block_k // GROUP_TILE)

    def counts(self, chunk, begin, end) -> tuple:
        return (self.down_of(chunk, begin, end),)

    def found(self, index, group, begin, end, sums) -> list:
        row, column, *k = self.part(index, group, sums[0], begin, end)
        return [row, self.packed(column, group), *k]

    def tile(self, words) -> Tile:
        row, word, k_begin, k_end = words
        column, group = self.unpacked(word)
        first = group * self.rows
        k_blocks = cute.ceil_div(k_end - k_begin, self.block_k // GROUP_TILE)
        scales = row // TILE_M, column // TILE_M
        part = k_begin, k_end, first + self.rows, group
        return Tile(first + row, column, (row, column), scales, k_blocks, *part)


@dataclass(frozen=True)
class TilePipeline:
    """What roles read tiles from, which are four integers, as from a ``ClcPipeline``."""

    ring: TileRing

    def first(self):
        """The first tile, and its slot and phase."""
        return self.ring.look(Int32(0), Int32(0)), Int32(0), Int32(0)

    def more(self, words):
        return words[0] != NONE

    def expect(self, slot) -> None:
        """Nothing: a warp of this CTA fills the ring."""

    def read(self, slot, phase):
        """The tile after the one of this slot."""
        return self.ring.look(*self.advance(slot, phase))

    def release(self, slot) -> None:
        self.ring.free(slot)

    def advance(self, slot, phase):
        return self.ring.advance(slot, phase)

    def next(self, slot, phase):
        words = self.read(slot, phase)
        self.release(slot)
        return words, *self.advance(slot, phase)


@dataclass(frozen=True)
class GroupFinder:
    """Fills the ring: the work of a warp in each CTA."""

    clc: ClcPipeline
    tiles: GroupedTiles
    ring: TileRing

    @cute.jit
    def __call__(self):
        clc, tiles = self.clc, self.tiles
        slot, phase = Int32(0), Int32(0)
        chunk, begin, end, sums = tiles.begin()
        count = tiles.count
        index, clc_stage, clc_phase = clc.first()
        while clc.more(index):
            if cute.arch.lane_idx() == 0:
                clc.expect(clc_stage)
            if index < count:
                down = index // tiles.across
                before = sums[0] - tiles.down_of(chunk, begin, end)
                if down < cute.arch.shuffle_sync(before, 0):  # they come in any order
                    chunk, begin, end, sums = tiles.begin()
                chunk, begin, end, sums = tiles.seek(chunk, begin, end, sums, down)
                group, first, last, ends = tiles.owner(chunk, begin, end, sums, down)
                self.ring.put(slot, phase, tiles.found(index, group, first, last, ends))
                slot, phase = self.ring.advance(slot, phase)
            index = clc.read(clc_stage, clc_phase)
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                clc.release(clc_stage)
            clc_stage, clc_phase = clc.advance(clc_stage, clc_phase)
        self.ring.put(slot, phase, [Int32(NONE)] * 4)


def most_clusters(config: Config, extent: tuple, groups):
    """On the host: the number of clusters of tiles that there may be of an output of ``extent``."""
    rows, columns = extent
    high, wide = (x * y for x, y in zip(config.tile, config.cluster, strict=True))
    across = cute.ceil_div(columns, wide)
    if config.grouping == "m":  # each group, and the rest, may end in a tile of its own
        return (cute.ceil_div(rows, high) + groups) * across
    return groups * cute.ceil_div(rows // groups, high) * across
