# mypy: ignore-errors
"""Which expert's rows a tile has. The ends of the experts' rows are known to the device alone.

Tiles of 128 rows are dealt out expert by expert, each expert starting with a new one, and to the
rows after the last expert's end, "the tail", at last. There are as many tiles as this may take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute, range_constexpr, select_

from ..common import ptx
from .config import GROUP_ROWS

__all__ = ["TileRows", "find_rows", "scale_rows", "tile_count"]


@dataclass(frozen=True)
class TileRows:
    """Rows of a tile.

    Attributes:
        start, stop: the first row, and the one after the last.
        scale_stop: the one after the last that has a scale.
        scale_start: the tile's first row among scales along rows.
        block: the tile's first block among scales along columns.
        unused: blocks that belong to no row, as two ranges (first, stop), the tile's to clear.
    """

    start: Any
    stop: Any
    scale_stop: Any
    scale_start: Any
    block: Any
    unused: Any = None


def scale_rows(rows, groups):
    """Rows of the buffer of scales, as ``layouts.Grouped.padded_rows``."""
    return (rows + groups * (GROUP_ROWS - 1)) // GROUP_ROWS * GROUP_ROWS


def tile_count(rows, groups):
    """Tiles that experts and tail may take."""
    return scale_rows(rows, groups + 1) // GROUP_ROWS


def find_rows(tile, offsets, rows, block_size: int) -> TileRows:
    """Rows of tile ``tile``, found by every warp for itself.

    ``offsets`` int32 (groups,) has the end of each expert's rows, ascending; ``rows`` is the
    number of all rows.
    """
    group, first, begin, end, empty = _find(tile, offsets)
    groups, owned = Int32(offsets.shape[0]), group < offsets.shape[0]
    local = tile - first
    start = begin + local * GROUP_ROWS
    end = Int32(select_(owned, end, rows))
    stop = Int32(select_(start + GROUP_ROWS < end, start + GROUP_ROWS, end))
    scale_stop = Int32(select_(owned, stop, Int32(0)))
    block = begin // block_size + group + local * (GROUP_ROWS // block_size)
    # Blocks between those of this group and the next one that is not empty; the tail's own.
    used = Int32(select_(owned, block + cute.ceil_div(stop - start, block_size), block))
    after = Int32(
        select_(owned, end // block_size + group + 1 + empty, rows // block_size + groups)
    )
    last = Int32(select_(stop == end, after, used + GROUP_ROWS // block_size))
    last = Int32(select_(last < after, last, after))
    after = Int32(select_(owned, Int32(select_(stop == end, after, used)), last))
    # Those of empty groups before all others.
    leading = Int32(select_(start == 0, group, Int32(0)))
    return TileRows(
        start=start,
        stop=stop,
        scale_stop=scale_stop,
        scale_start=tile * GROUP_ROWS,
        block=block,
        unused=((Int32(0), leading), (used, after)),
    )


@cute.jit
def _find(tile, offsets):
    """Group of a tile, the group's first tile, its first row, the row after its last, and how many
    empty groups follow. For the tail the number of groups, and nothing of the last two.
    """
    lane = cute.arch.lane_idx()
    count = Int32(offsets.shape[0])
    base, before = Int32(0), Int32(0)  # tiles and rows of the groups so far
    group, first, begin, end, empty = count, Int32(0), Int32(0), Int32(-1), Int32(0)
    for chunk in range(cute.ceil_div(count, 32)):
        index = chunk * 32 + lane
        known = Int32(select_(index < count, index, count - 1))  # groups beyond have no rows
        last = Int32(ptx.load_global(offsets.iterator.toint() + known * 4, 4))
        previous = cute.arch.shuffle_sync_up(last, 1, mask_and_clamp=0)
        previous = Int32(select_(lane == 0, before, previous))
        tiles = (last - previous + GROUP_ROWS - 1) // GROUP_ROWS
        total = tiles
        for i in range_constexpr(5):
            other = cute.arch.shuffle_sync_up(total, 1 << i, mask_and_clamp=0)
            total = total + Int32(select_(lane >= (1 << i), other, Int32(0)))
        total = total + base
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(total <= tile))
        if passed < 32 and group == count:
            group = chunk * 32 + passed
            first = cute.arch.shuffle_sync(total - tiles, passed)
            begin = cute.arch.shuffle_sync(previous, passed)
            end = cute.arch.shuffle_sync(last, passed)
        following = Int32(select_(index < count, last, Int32(-2)))
        following = Int32(select_(index > group, following, Int32(-2)))
        empty = empty + cute.arch.popc(cute.arch.vote_ballot_sync(following == end))
        base = cute.arch.shuffle_sync(total, 31)
        before = cute.arch.shuffle_sync(last, 31)
    if group == count:
        first, begin = base, before
    return group, first, begin, end, empty
