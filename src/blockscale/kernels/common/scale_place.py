# mypy: ignore-errors
"""Where a scale lies in memory: see ``layouts``."""

from __future__ import annotations

from cutlass import Int64, cute

from ...formats import Format

__all__ = ["scale_place"]


def scale_place(scale, where, lines: tuple[str, int], format: Format, k):
    """Byte offset of the scale at ``where``: its place across the contraction, and its block.

    ``scale`` as the layout stores it; ``lines``: the layout, and the axis of the contraction in the
    tensor whose compact scales are given; ``k``: elements along the contraction.
    """
    (outer, block), (layout, axis), itemsize = where, lines, format.scale.nbytes
    if layout == "tcgen05":
        tiles = cute.ceil_div(cute.ceil_div(k, format.block_size), 4)
        tile = Int64(outer >> 7) * tiles + (block >> 2)
        return tile * 512 + ((outer & 31) * 16 + ((outer >> 5) & 3) * 4 + (block & 3))
    if layout == "packed":
        return (Int64(block >> 2) * scale.stride[0] + outer) * 4 + (block & 3)
    if layout == "sm90":
        return (Int64(block) * scale.stride[0] + outer) * itemsize
    first, second = (outer, block) if axis == -1 else (block, outer)
    return (Int64(first) * scale.stride[-2] + Int64(second) * scale.stride[-1]) * itemsize
