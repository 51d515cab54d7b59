# mypy: ignore-errors
"""Which expert's rows a tile has. The ends of the experts' rows are known to the device alone.

Tiles of 128 rows are dealt out expert by expert, each expert starting with a new one, and to the
rows after the last expert's end, "the tail", at last. There are as many tiles as this may take.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute, range_constexpr, select_

from ...formats import GROUP_TILE
from ..common import ptx
from ..common.scan import inclusive_scan
from .applied import NOTHING, Applied

__all__ = ["TileRows", "find_rows", "scale_rows", "tile_count"]

_GROUPS_A_LANE = 4  # whose ends are loaded at once


@dataclass(frozen=True)
class TileRows:
    """Rows of a tile.

    Attributes:
        start, stop: the first row, and the one after the last.
        scale_stop: the one after the last that has a scale.
        scale_start: the tile's first row among scales along rows.
        apart: the first row where groups are moved apart, as scales along columns have them;
            beyond all, of the tail.
        unused: tiles of no row there, as two ranges (first, stop), this one's to clear.
        applied: what is applied to their elements.
    """

    start: Any
    stop: Any
    scale_stop: Any
    scale_start: Any
    apart: Any
    unused: Any = None
    applied: Applied = NOTHING

    def random(self, part, where, order, below: int = 0) -> list | None:
        """Random bits, if there are any, of 16 elements of a part of the tile, read in ``order``:
        from the row and column ``where`` on, or so many rows ``below``."""
        if self.applied.noise is None:
            return None
        row, column = where
        return self.applied.noise.of_row(self.start + row + below, part.column + column, order)


def scale_rows(rows, groups):
    """Rows of the buffer of scales, as ``layouts.Grouped.padded_rows``."""
    return (rows + groups * (GROUP_TILE - 1)) // GROUP_TILE * GROUP_TILE


def tile_count(rows, groups):
    """Tiles that experts and tail may take."""
    return scale_rows(rows, groups + 1) // GROUP_TILE


def find_rows(tile, offsets, rows) -> TileRows:
    """Rows of tile ``tile``, found by every warp for itself.

    ``offsets`` int32 (groups,) has the end of each expert's rows, ascending; ``rows`` is the
    number of all rows.
    """
    group, first, begin, end, empty = _find(tile, offsets, rows)
    groups, owned = Int32(offsets.shape[0]), group < offsets.shape[0]
    local = tile - first
    start = begin + local * GROUP_TILE
    end = Int32(select_(owned, end, rows))
    stop = Int32(select_(start + GROUP_TILE < end, start + GROUP_TILE, end))
    apart = begin // GROUP_TILE + group + local
    # Tiles between those of this group and the next one that is not empty; each of the tail.
    used = Int32(select_(owned, apart + 1, apart))
    count = rows // GROUP_TILE + groups
    following = Int32(select_(stop == end, end // GROUP_TILE + group + 1 + empty, apart + 1))
    after = Int32(select_(owned, following, cutlass.min(apart + 1, count)))
    # Those of empty groups before all others.
    leading = Int32(select_(start == 0, group, Int32(0)))
    return TileRows(
        start=start,
        stop=stop,
        scale_stop=Int32(select_(owned, stop, Int32(0))),
        scale_start=tile * GROUP_TILE,
        apart=Int32(select_(owned, apart, count)) * GROUP_TILE,
        unused=((Int32(0), leading), (used, after)),
    )


@cute.jit
def _find(tile, offsets, rows):
    """Group of a tile, the group's first tile, its first row, the row after its last, and how many
    empty groups follow. For the tail the number of groups, and nothing of the last two. Offsets
    that are none of these rows are taken for the nearest that is.
    """
    lane = cute.arch.lane_idx()
    count = Int32(offsets.shape[0])
    base, before = Int32(0), Int32(0)  # tiles and rows of the groups so far
    group, first, begin, end, empty = count, Int32(0), Int32(0), Int32(-1), Int32(0)
    for chunk in range(cute.ceil_div(count, 32 * _GROUPS_A_LANE)):
        index = (chunk * 32 + lane) * _GROUPS_A_LANE
        lasts = []
        for i in range_constexpr(_GROUPS_A_LANE):
            known = cutlass.min(index + i, count - 1)  # groups beyond have no rows
            last = Int32(ptx.load_global(offsets.iterator.toint() + known * 4, 4))
            lasts.append(cutlass.max(cutlass.min(last, rows), Int32(0)))
        previous = cute.arch.shuffle_sync_up(lasts[-1], 1, mask_and_clamp=0)
        previous = Int32(select_(lane == 0, before, previous))
        tiles = Int32(0)  # of the lane's groups
        for start, last in zip([previous, *lasts], lasts, strict=False):
            tiles = tiles + _tiles(start, last)
        total = inclusive_scan(tiles, operator.add) + base
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(total <= tile))
        if passed < 32 and group == count:
            found = cute.arch.shuffle_sync(total - tiles, passed)
            start = cute.arch.shuffle_sync(previous, passed)
            for i in range_constexpr(_GROUPS_A_LANE):
                last = cute.arch.shuffle_sync(lasts[i], passed)
                following = found + _tiles(start, last)
                if found <= tile and tile < following:
                    group, first = (chunk * 32 + passed) * _GROUPS_A_LANE + i, found
                    begin, end = start, last
                found, start = following, last
        for i in range_constexpr(_GROUPS_A_LANE):
            is_empty = (index + i < count and index + i > group) and lasts[i] == end
            empty = empty + cute.arch.popc(cute.arch.vote_ballot_sync(is_empty))
        base = cute.arch.shuffle_sync(total, 31)
        before = cute.arch.shuffle_sync(lasts[-1], 31)
    if group == count:
        first, begin = base, before
    return group, first, begin, end, empty


def _tiles(start, stop):
    return (stop - start + GROUP_TILE - 1) // GROUP_TILE
