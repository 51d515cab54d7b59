# mypy: ignore-errors
"""Where the tiles of groups are, whose ends are known to the device alone: group after group, those
of each in the order of a :class:`Raster`.

A warp finds tiles for those that work on them: a lane has a group, and 32 of them find theirs at
once.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute

from ...formats import GROUP_TILE
from .scan import inclusive_scan
from .schedule import Raster

__all__ = ["ColumnGroups", "RowGroups"]


@dataclass(frozen=True, kw_only=True)
class RowGroups:
    """Groups of rows, and the rows after the last one's end, the rest, as one more group.

    Attributes:
        shape: rows and columns of a tile.
        offsets: (groups,) int32, the end of each group. One that is less than the one before, or
            beyond the matrix, is taken for the nearest that is not. Or, ``masked``, how many rows
            each group has, of an equal share of all; there is no rest then.
        supergroup: tiles down a group that are taken before the next ones across, about.
        extent: rows and columns of the output.
        across_first: the supergroup is of tiles across, which are taken before the next ones down.
        masked: see ``offsets``.
        cluster: tiles down and across that CTAs of a cluster take at once.
        rank: of the CTA in its cluster.
    """

    shape: tuple[int, int]
    offsets: Any
    supergroup: Any
    extent: tuple
    across_first: bool = False
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
    def capacity(self):
        """The rows that a masked group may have."""
        return self.extent[0] // self.groups

    @property
    def across(self):
        """Clusters across the output."""
        return Int32(cute.ceil_div(self.extent[1], self.shape[1] * self.cluster[1]))

    @property
    def count(self):
        """Clusters of tiles in all; called by a warp."""
        return self.down() * self.across

    @cute.jit
    def down(self):
        """Clusters down all groups."""
        clusters, before = Int32(0), Int32(0)
        for chunk in range(0, self.groups + 1, 32):
            begin, end = self.bounds(chunk, before)
            clusters = clusters + self.down_of(chunk, begin, end)
            before = cute.arch.shuffle_sync(end, 31)
        return cute.arch.warp_redux_sync(clusters, "add")

    def down_of(self, chunk, begin, end):
        """Clusters down the group of a lane, of 32 from ``chunk`` on."""
        return cute.ceil_div(end - begin, self.shape[0] * self.cluster[0])

    def counts(self, chunk, begin, end) -> tuple:
        """What is counted of a lane's group: clusters down it first."""
        return (self.down_of(chunk, begin, end),)

    @cute.jit
    def bounds(self, chunk, before):
        """Of 32 groups from ``chunk`` on, one a lane: the first row, and the one after the last;
        groups before them end at row ``before``. The rest is the last group, unless groups are
        masked; those after it have no rows."""
        rows, group = self.grouped, chunk + cute.arch.lane_idx()
        if const_expr(self.masked):
            count = Int32(0)
            if group < self.groups:
                count = cutlass.max(cutlass.min(self.offsets[group], self.capacity), Int32(0))
            begin, end = group * self.capacity, group * self.capacity + count
        else:
            end = rows
            if group < self.groups:
                end = cutlass.min(self.offsets[group], rows)
            end = inclusive_scan(cutlass.max(end, before), cutlass.max)
            begin = cute.arch.shuffle_sync_up(end, 1, mask_and_clamp=0)
            begin = Int32(cutlass.select_(cute.arch.lane_idx() == 0, before, begin))
        return begin, end

    def begin(self) -> tuple:
        """The first 32 groups, as :meth:`seek` takes them."""
        return Int32(0), *self._chunk(Int32(0), Int32(0))

    @cute.jit
    def seek(self, chunk, begin, end, sums, down):
        """The 32 groups that have the ``down``-th cluster of all, these or later ones: the first of
        them; bounds; and the sums of :meth:`counts` of all groups up to a lane's."""
        while cute.arch.shuffle_sync(sums[0], 31) <= down:
            chunk = chunk + 32
            before = tuple(cute.arch.shuffle_sync(each, 31) for each in sums)
            begin, end, own = self._chunk(chunk, cute.arch.shuffle_sync(end, 31))
            sums = tuple(x + y for x, y in zip(before, own, strict=True))
        return chunk, begin, end, sums

    def owner(self, chunk, begin, end, sums, down) -> tuple:
        """The group that has it; its bounds, and what is summed up to its end."""
        lane = cute.arch.popc(cute.arch.vote_ballot_sync(sums[0] <= down))
        begin, end, *sums = (cute.arch.shuffle_sync(each, lane) for each in (begin, end, *sums))
        return chunk + lane, begin, end, sums

    def _chunk(self, chunk, before) -> tuple:
        """Bounds of 32 groups, and sums of what is counted of them, up to a lane's."""
        begin, end = self.bounds(chunk, before)
        counts = self.counts(chunk, begin, end)
        return begin, end, tuple(inclusive_scan(each, operator.add) for each in counts)

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


@dataclass(frozen=True, kw_only=True)
class ColumnGroups(RowGroups):
    """Groups of columns of A and B, which are moved apart, as ``formats.padded_groups`` says; each
    has an output of its own, and these lie one below the other.

    Attributes:
        extent: rows of all outputs, and columns.
        skips_empty: groups without columns have no tiles, as nothing is to be added to theirs.
    """

    skips_empty: bool = False

    @property
    def k_tiles(self):
        """Tiles of ``GROUP_TILE`` columns of A and B."""
        raise NotImplementedError

    @property
    def grouped(self):
        """What groups are of: as many columns as there may be, without room between groups."""
        return (self.k_tiles - self.groups + 1) * GROUP_TILE - 1

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

    def part(self, index, group, after, begin, end) -> tuple:
        """Row and column in a group where the CTA's tile of the ``index``-th cluster of all begins,
        and the group's first tile along K and the one after its last. The ``after``-th cluster down
        follows the group, whose columns begin and end there."""
        row, column = self.place(index - (after - self.down_each) * self.across, self.down_each)
        k_begin = begin // GROUP_TILE + group
        return row, column, k_begin, k_begin + cute.ceil_div(end - begin, GROUP_TILE)
