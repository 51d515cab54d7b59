"""Tensors of any number of dimensions as a matrix, or as many of them, by shape and strides."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...formats import Format

__all__ = ["View", "as_matrices", "is_contiguous", "turn"]

View = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


def turn(view: View) -> View:
    """The last two dimensions exchanged."""
    shape, stride = view
    return (
        (*shape[:-2], shape[-1], shape[-2]),
        (*stride[:-2], stride[-1], stride[-2]),
    )


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements lie one after another."""
    step = 1
    for n, apart in reversed(list(zip(shape, stride, strict=True))):
        if n != 1 and apart != step:
            return False
        step *= n
    return True


def _merge(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, int] | None:
    """Dimensions as one: its length and stride."""
    count, apart = 1, 0
    for n, step in reversed(list(zip(shape, stride, strict=True))):
        if n == 1:
            continue
        if count > 1 and step != count * apart:
            return None
        count, apart = count * n, apart if count > 1 else step
    return count, apart


def as_matrices(
    data: View,
    scale: View,
    out: tuple[int, ...],
    format: Format,
    down: bool,
    turned: bool,
) -> tuple[View, View, View] | None:
    """Data, scales and output as a matrix each, or as many of them; None where they cannot be.

    ``data`` has its bytes in the last dimension, and ``out`` is the shape of as many rows.
    """
    matrix = len(out) == 2
    if matrix:
        return data, scale, (out, (out[1], 1))
    # scales of a matrix below another's are their neighbours, too
    high = format.block_size if down else format.block[0]
    stacks = not turned and (len(out) == 1 or out[-2] % high == 0)
    if stacks:
        rows, outers = _merge(data[0][:-1], data[1][:-1]), _merge(scale[0][:-1], scale[1][:-1])
        if rows is not None and outers is not None:
            width = out[-1]
            return (
                ((rows[0], data[0][-1]), (rows[1], data[1][-1])),
                ((outers[0], scale[0][-1]), (outers[1], scale[1][-1])),
                ((math.prod(out[:-1]), width), (width, 1)),
            )
    if len(out) < 3:
        return None
    found: list[View] = []
    for shape, stride in (data, scale):
        lead = _merge(shape[:-2], stride[:-2])
        if lead is None:
            return None
        found.append(((lead[0], *shape[-2:]), (lead[1], *stride[-2:])))
    whole = math.prod(out[:-2]), *out[-2:]
    return found[0], found[1], (whole, (whole[1] * whole[2], whole[2], 1))
