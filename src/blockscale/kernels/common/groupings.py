"""What may be grouped of a product, see ``calls.Groups``, and what stays in the L2 cache of it."""

from __future__ import annotations

import math

__all__ = ["GROUPINGS", "square"]

GROUPINGS = ("", "m", "masked", "k")


def square(tile: tuple[int, int], in_flight: int) -> int:
    """Tiles down of as many as are in flight at once, if they are a square of the output."""
    rows, columns = tile
    return max(1, round(math.sqrt(in_flight * columns / rows)))
