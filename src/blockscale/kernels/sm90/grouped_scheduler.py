# mypy: ignore-errors
"""Which tiles a CTA takes of products whose rows are grouped, each group's with its own B.
(``k_grouped_tiles`` has those whose columns are.)

As ``dense_scheduler``, group after group, and the rows after the last one's end, the rest, which
are set to zero. Tiles begin where groups do: the last one of a group reaches up into those before
it; a group that has fewer rows than a tile ends within it. A warp finds the tiles, ahead of those
that work on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from ..common.grouped_tiles import RowGroups
from ..common.persistent import cluster_id_and_count
from ..common.tile_ring import TileRing
from .dense_scheduler import Tile

__all__ = ["GroupedScheduler", "GroupedTiles", "TileFinder"]


@dataclass(frozen=True, kw_only=True)
class GroupedTiles(RowGroups):
    """The tiles of a CTA: every so many-th of ``count``, which a ring gives.

    Attributes:
        k_blocks_of_tile: of A and B.
        rest_k_blocks: of tiles of the rest, whose sums are not those of the output.
    """

    ring: TileRing
    k_blocks_of_tile: Any
    rest_k_blocks: int = 0

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
        tiles = self.tiles
        start, step = tiles.first()
        chunk, begin, end, sums = tiles.begin()
        for index in range(start, tiles.count, step):
            down = index // tiles.across
            chunk, begin, end, sums = tiles.seek(chunk, begin, end, sums, down)
            group, first, last, ends = tiles.owner(chunk, begin, end, sums, down)
            tiles.ring.write(tiles.turn(index), tiles.found(index, group, ends[0], first, last))


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
        offsets, supergroup = groups
        return self.kind(
            shape=self.shape,
            ring=ring,
            offsets=offsets,
            supergroup=supergroup,
            extent=extent,
            k_blocks_of_tile=k_blocks,
            rank=rank,
            **self.options,
        )
