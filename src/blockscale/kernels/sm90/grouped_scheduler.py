# mypy: ignore-errors
"""Which tiles a CTA takes of products whose rows are grouped, each group's with its own B.
(``k_grouped_tiles`` has those whose columns are.)

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
        cluster: tiles down and across that CTAs of a cluster take at once.
        rank: of the CTA in its cluster.
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
    cluster: tuple[int, int] = (1, 1)
    rank: Any = 0

    @property
    def groups(self):
        return Int32(self.offsets.shape[0])

    @property
    def grouped(self):
        """What groups are of: rows."""
        return self.extent[0]

    @property
    def across(self):
        return Int32(cute.ceil_div(self.extent[1], self.shape[1] * self.cluster[1]))

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
            tiles = tiles + self.down_of(chunk, begin, end)
            before = cute.arch.shuffle_sync(end, 31)
        return cute.arch.warp_redux_sync(tiles, "add")

    def down_of(self, chunk, begin, end):
        """Tiles down the group of a lane, of 32 from ``chunk`` on."""
        return cute.ceil_div(end - begin, self.shape[0])

    @cute.jit
    def bounds(self, chunk, before):
        """Of 32 groups from ``chunk`` on, one a lane: the first row, and the one after the last;
        groups before them end at row ``before``. The rest is the last group, unless groups are
        masked; those after it have no rows."""
        rows, group = self.grouped, chunk + cute.arch.lane_idx()
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
        return cluster_id_and_count(self.cluster[0] * self.cluster[1])

    def turn(self, index):
        """How many tiles of the CTA come before."""
        first, step = self.first()
        return (index - first) // step

    def tile(self, index) -> Tile:
        """Called by a warp, once."""
        row, column, end, group = self.ring.read(self.turn(index))
        b_row = group * self.extent[1] + column
        return Tile(row, column, Int32(0), self._k_blocks(group), end, group, row, b_row)

    def found(self, index, group, after, begin, end) -> tuple:
        """What the ring has of a tile of a group whose rows begin and end there, and after whose
        last tile down is the ``after``-th of all."""
        down = cute.ceil_div(end - begin, self.shape[0])
        row, column = self.place(index - (after - down) * self.across, down)
        reach = cutlass.max(end - begin - self.shape[0], Int32(0))
        return begin + cutlass.min(row, reach), column, end, group

    def place(self, index, down) -> tuple:
        """Row and column in a group of so many clusters ``down`` where the CTA's tile of the
        ``index``-th one begins."""
        shape, extent = self.shape, (down, self.across)
        if self.across_first:
            shape, extent = shape[::-1], extent[::-1]
        # bands that are alike, each about as high as is wanted
        height = self.supergroup
        bands = cutlass.max((extent[0] + height // 2) // height, Int32(1))
        raster = Raster(shape, self.cluster, cute.ceil_div(extent[0], bands))
        place = raster.tile(index, extent, self.rank)
        return place[::-1] if self.across_first else place

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
        tiles, across = self.tiles, self.tiles.across
        start, step = tiles.first()
        chunk = Int32(0)
        begin, end = tiles.bounds(chunk, chunk)
        after = _sums(tiles.down_of(chunk, begin, end))  # the first tile down of the next group
        for index in range(start, tiles.count, step):
            down = index // across
            while cute.arch.shuffle_sync(after, 31) <= down:
                chunk, before = chunk + 32, cute.arch.shuffle_sync(after, 31)
                begin, end = tiles.bounds(chunk, cute.arch.shuffle_sync(end, 31))
                after = before + _sums(tiles.down_of(chunk, begin, end))
            owner = cute.arch.popc(cute.arch.vote_ballot_sync(after <= down))
            values = [cute.arch.shuffle_sync(each, owner) for each in (after, begin, end)]
            tiles.ring.write(tiles.turn(index), tiles.found(index, chunk + owner, *values))


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
    """All tiles of a matrix (M, N), in the order of a :class:`Raster` in each group: ``kind``, with
    ``options`` of it."""

    def __init__(self, shape: tuple[int, int], kind: type = GroupedTiles, **options: Any):
        self.shape, self.kind, self.options = shape, kind, options

    def grid(self, d, multiprocessors, groups):
        """On the host, which does not know how many tiles there are: CTAs for the most, or one for
        each multiprocessor."""
        (rows, columns), (m, n) = self.shape, d.shape
        high, wide = self.options.get("cluster", (1, 1))
        down = cute.ceil_div(m, rows * high) + groups[0].shape[0]
        clusters = Int32(down * cute.ceil_div(n, columns * wide))
        return cutlass.min(clusters, multiprocessors // (high * wide)) * (high * wide)

    def tiles(self, d, k_blocks, rank, k_part, groups, ring) -> GroupedTiles:
        """On the device."""
        extent = Int32(d.shape[0]), Int32(d.shape[1])
        return self.kind(self.shape, ring, *groups, extent, k_blocks, rank=rank, **self.options)
