"""Dimensions of products, and which of them belong together, for :mod:`.cut`."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax

from .array import ScaledArray
from .cut import Cut, Dims, Factor, Work, names_of
from .factors import Matrix, of_scalars, parts, plain

__all__ = ["SUMMED", "product_work", "summed"]

#: The name of the contraction.
SUMMED = "summed"

#: Elements along the contraction, so that kernels can load rows of any product's shards.
_ALIGNED = 64


def product_work(
    run: Callable[[Cut], Callable[..., jax.Array]],
    a: ScaledArray | jax.Array,
    b: ScaledArray,
    bias: jax.Array | None = None,
) -> Work:
    """``a @ b + bias``, whose contraction ``run`` adds up (:func:`summed`) where it is cut."""
    formats = [x.kind for x in (a, b) if isinstance(x, ScaledArray)]
    compact = all(x.layout == "compact" for x in (a, b) if isinstance(x, ScaledArray))
    k = math.lcm(_ALIGNED, *(each.block_size for each in formats))
    contraction = SUMMED, k if compact and a.shape[-1] % k == 0 else None
    rows, columns = _free(a, "rows", -2), _free(b, "columns", -1)
    left, right = _operand(a, (rows, contraction), -1), _operand(b, (contraction, columns), -2)
    product = plain(b.ndim, (rows, columns))
    product = (*product[:-2], *(each and Factor(each.name) for each in product[-2:]))
    added = [] if bias is None else [product[-1:]]
    return Work(
        run,
        (*left, *right, *added),
        (product,),
        sums=(SUMMED,) if contraction[1] else (),
        scatters=tuple({*names_of(product)}.difference(*map(names_of, added))),
    )


def summed(part: jax.Array, cut: Cut) -> jax.Array:
    """The sum of all parts of a product in fp32, or this device's share of it."""
    axes = cut.axes.get(SUMMED, ())
    for place, each in enumerate(plain(part.ndim, (("rows", 1), ("columns", 1)))):
        share = () if each is None else cut.scattered.get(each.name, ())
        if share:
            part = jax.lax.psum_scatter(part, share, scatter_dimension=place, tiled=True)
            axes = tuple(axis for axis in axes if axis not in share)
    return jax.lax.psum(part, axes) if axes else part


def _free(x: ScaledArray | jax.Array, name: str, dimension: int) -> tuple[str, int | None]:
    """A dimension that is not the contraction's, in whole blocks."""
    if not isinstance(x, ScaledArray):
        return name, 1
    rows = x.kind.block[0]
    return name, None if x.layout != "compact" or x.shape[dimension] % rows else rows


def _operand(x: ScaledArray | jax.Array, matrix: Matrix, axis: int) -> list[Dims]:
    if not isinstance(x, ScaledArray):
        return [plain(x.ndim, matrix)]
    return [
        *parts(x.ndim, matrix, x.kind, axis, x.turned),
        *of_scalars(x.ndim, x.global_scale),
    ]
