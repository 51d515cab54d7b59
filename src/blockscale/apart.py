"""Groups along a contraction, moved apart so that each begins with a tile: what lies where.

Group i begins at ``(offsets[i-1] // GROUP_TILE + i) * GROUP_TILE``, as ``formats.padded_groups``
says. Ends are ascending, and at most ``k``, the length of the contraction. Arrays are torch's,
numpy's or, where it has 64 bits, JAX's; what is returned is int64.
"""

from __future__ import annotations

from .arrays import Array, device_of, namespace
from .formats import GROUP_TILE, padded_groups

__all__ = ["apart_position", "apart_source", "tile_groups"]


def apart_position(offsets: Array, k: int) -> Array:
    """Where each of ``k`` elements lies; those of no group, anywhere.

    >>> apart_position(np.array([2, 4]), 4)
    array([  0,   1, 128, 129])
    """
    xp, (starts, ends) = namespace(offsets), _bounds(offsets)
    element = xp.arange(k, dtype=xp.int64, device=device_of(offsets))
    group = xp.searchsorted(ends, element, side="right")
    starts = xp.concat([starts, ends[-1:]])  # of what follows the last group, too
    position = xp.take(_steps(starts), group, axis=0) + element
    return xp.clip(position, max=padded_groups(k, offsets.shape[0]) - 1)


def apart_source(offsets: Array, k: int) -> Array:
    """The inverse: which element lies in each place; ``k`` where none does.

    >>> apart_source(np.array([2, 4]), 5)[[0, 1, 2, 128, 129, 130]]
    array([0, 1, 5, 2, 3, 5])
    """
    xp, (starts, ends) = namespace(offsets), _bounds(offsets)
    group = xp.repeat(tile_groups(offsets, k), GROUP_TILE)
    place = xp.arange(group.shape[0], dtype=xp.int64, device=device_of(offsets))
    element = place - xp.take(_steps(starts), group, axis=0)
    return xp.where(element < xp.take(ends, group, axis=0), element, k)


def tile_groups(offsets: Array, k: int) -> Array:
    """The group that each tile has elements of; of a tile without any, the one before it.

    >>> tile_groups(np.array([2, 2, 260]), 300)
    array([0, 1, 2, 2, 2])
    """
    xp, (starts, _) = namespace(offsets), _bounds(offsets)
    count = padded_groups(k, offsets.shape[0]) // GROUP_TILE
    tile = xp.arange(count, dtype=xp.int64, device=device_of(offsets))
    first = (starts + _steps(starts)) // GROUP_TILE
    return xp.searchsorted(first, tile, side="right") - 1


def _bounds(offsets: Array) -> tuple[Array, Array]:
    """The first element of each group, and the one after its last."""
    xp = namespace(offsets)
    ends = xp.astype(offsets, xp.int64)
    return xp.concat([xp.zeros_like(ends[:1]), ends[:-1]]), ends


def _steps(starts: Array) -> Array:
    """By how many places each group is moved from where it starts."""
    number = namespace(starts).arange(starts.shape[0], device=device_of(starts))
    return (starts // GROUP_TILE + number) * GROUP_TILE - starts
