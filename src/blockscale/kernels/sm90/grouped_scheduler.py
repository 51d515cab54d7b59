# mypy: ignore-errors
"""Which tiles a CTA takes of products whose rows are grouped, each group's with its own B.

As ``dense_scheduler``, group after group, and the rows after the last one's end, the rest, which
are set to zero. Tiles begin where groups do: the last one of a group reaches up into those before
it; a group that has fewer rows than a tile ends within it.

Where groups end is known to the device alone. A warp finds the tiles, ahead of those that work on
them: a lane has a group, and 32 of them find theirs at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute

from ..common.persistent import cluster_id_and_count
from ..common.schedule import Raster
from ..common.tile_ring import TileRing
from .dense_scheduler import Tile

__all__ = ["GroupedScheduler", "GroupedTiles", "TileFinder"]


@dataclass(frozen=True)
class GroupedTiles:
    """The tiles of a CTA: every so many-th of ``count``, which a ring gives.

    Attributes:
        shape: rows and columns of a tile.
        offsets: (groups,) int32, the end of each group. One that is less than the one before, or
            beyond the matrix, is taken for the nearest that is not. Or, ``masked``, how many rows
            each group has, of an equal share of all; there is no rest then.
        supergroup: tiles down a group that are taken before the next ones across, about.
        extent: rows and columns of the output.
        across_first: the supergroup is of tiles across, which are taken before the next ones down.
        rest_k_blocks: of tiles of the rest, whose sums are not those of the output.
        rank: 0, as no CTAs share tiles.
    """

    shape: tuple[int, int]
    ring: TileRing
    offsets: Any
    supergroup: Any
    extent: tuple
    k_blocks_of_tile: Any
    across_first: bool = False
    rest_k_blocks: int = 0
    masked: bool = False
    rank: int = 0

    @property
    def groups(self):
        return Int32(self.offsets.shape[0])

    @property
    def across(self):
        return Int32(cute.ceil_div(self.extent[1], self.shape[1]))

    @property
    def count(self):
        """Called by a warp."""
        return self.down() * self.across

    @cute.jit
    def down(self):
        """Tiles down all groups and the rest."""
        tiles, before = Int32(0), Int32(0)
        for chunk in range(0, self.groups + 1, 32):
            begin, end = self.bounds(chunk, before)
            tiles = tiles + cute.ceil_div(end - begin, self.shape[0])
            before = cute.arch.shuffle_sync(end, 31)
        return cute.arch.warp_redux_sync(tiles, "add")

    @cute.jit
    def bounds(self, chunk, before):
        """Of 32 groups from ``chunk`` on, one a lane: the first row, and the one after the last;
        groups before them end at row ``before``. The rest is the last group, unless groups are
        masked; those after it have no rows."""
        rows, group = self.extent[0], chunk + cute.arch.lane_idx()
        if const_expr(self.masked):
            count, capacity = Int32(0), rows // self.groups
            if group < self.groups:
                count = cutlass.max(cutlass.min(self.offsets[group], capacity), Int32(0))
            begin, end = group * capacity, group * capacity + count
        else:
            end = rows
            if group < self.groups:
                end = cutlass.min(self.offsets[group], rows)
            end = _of_lanes_to(cutlass.max(end, before), cutlass.max)
            begin = cute.arch.shuffle_sync_up(end, 1, mask_and_clamp=0)
            begin = Int32(cutlass.select_(cute.arch.lane_idx() == 0, before, begin))
        return begin, end

    def first(self):
        """The CTA's first one, and how far its others are apart."""
        return cluster_id_and_count(1)

    def turn(self, index):
        """How many tiles of the CTA come before."""
        first, step = self.first()
        return (index - first) // step

    def tile(self, index) -> Tile:
        """Called by a warp, once."""
        row, column, end, group = self.ring.read(self.turn(index))
        b_row = group * self.extent[1] + column
        return Tile(row, column, Int32(0), self._k_blocks(group), end, group, b_row)

    def k_blocks(self, index):
        """Those of ``tile(index)``; called by a warp, before that."""
        return self._k_blocks(self.ring.peek(self.turn(index))[3])

    def _k_blocks(self, group):
        rest = Int32(self.rest_k_blocks)
        return Int32(cutlass.select_(group == self.groups, rest, self.k_blocks_of_tile))


@dataclass(frozen=True)
class TileFinder:
    """Fills the ring: a warp's work."""

    tiles: GroupedTiles

    @cute.jit
    def __call__(self):
        tiles, rows, across = self.tiles, self.tiles.shape[0], self.tiles.across
        start, step = tiles.first()
        chunk = Int32(0)
        begin, end = tiles.bounds(chunk, chunk)
        after = _sums(cute.ceil_div(end - begin, rows))  # the first tile down of the next group
        for index in range(start, tiles.count, step):
            down = index // across
            while cute.arch.shuffle_sync(after, 31) <= down:
                chunk, before = chunk + 32, cute.arch.shuffle_sync(after, 31)
                begin, end = tiles.bounds(chunk, cute.arch.shuffle_sync(end, 31))
                after = before + _sums(cute.ceil_div(end - begin, rows))
            owner = cute.arch.popc(cute.arch.vote_ballot_sync(after <= down))
            values = [cute.arch.shuffle_sync(each, owner) for each in (after, begin, end)]
            place = self.place(index, *values)
            tiles.ring.write(tiles.turn(index), (*place, values[2], chunk + owner))

    def place(self, index, after, begin, end) -> tuple:
        """First row and column of a tile of the group whose rows begin and end there."""
        tiles, across = self.tiles, self.tiles.across
        rows = tiles.shape[0]
        down = cute.ceil_div(end - begin, rows)
        shape, extent, height = tiles.shape, (down, across), tiles.supergroup
        if tiles.across_first:
            shape, extent = shape[::-1], extent[::-1]
        # bands that are alike, each about as high as is wanted
        bands = cutlass.max((extent[0] + height // 2) // height, Int32(1))
        raster = Raster(shape, (1, 1), cute.ceil_div(extent[0], bands))
        place = raster.tile(index - (after - down) * across, extent, 0)
        row, column = place[::-1] if tiles.across_first else place
        return begin + cutlass.min(row, cutlass.max(end - begin - rows, Int32(0))), column


def _sums(value):
    return _of_lanes_to(value, lambda x, y: x + y)


def _of_lanes_to(value, combine):
    """What ``combine`` makes of the values of all lanes up to one; none is negative."""
    lane = cute.arch.lane_idx()
    for i in range(5):
        other = cute.arch.shuffle_sync_up(value, 1 << i, mask_and_clamp=0)
        value = combine(value, Int32(cutlass.select_(lane >= (1 << i), other, Int32(0))))
    return value


class GroupedScheduler:
    """All tiles of a matrix (M, N), in the order of a :class:`Raster` in each group. ``options`` of
    ``GroupedTiles``."""

    def __init__(self, shape: tuple[int, int], **options: Any):
        self.shape, self.options = shape, options

    def grid(self, d, multiprocessors, groups):
        """On the host, which does not know how many tiles there are: the most, or one for each
        multiprocessor."""
        (rows, columns), (m, n) = self.shape, d.shape
        down = cute.ceil_div(m, rows) + groups[0].shape[0]
        return cutlass.min(Int32(down * cute.ceil_div(n, columns)), multiprocessors)

    def tiles(self, d, k_blocks, rank, k_part, groups, ring) -> GroupedTiles:
        """On the device."""
        extent = Int32(d.shape[0]), Int32(d.shape[1])
        return GroupedTiles(self.shape, ring, *groups, extent, k_blocks, **self.options)
