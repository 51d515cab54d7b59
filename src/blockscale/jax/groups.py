"""Rows in groups: where they lie whose blocks start anew in each, and how scales of groups do.

Ends of groups are taken as kernels take them: one that is less than the one before, or more than
there are rows, for the nearest that is not.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ..apart import apart_position, apart_source, tile_groups
from ..blocks import spread_squares
from ..layouts import Layout, swizzle_scale, unswizzle_scale
from ..layouts.base import as_bytes

if TYPE_CHECKING:
    from .formulas import Asked

__all__ = ["as_stored", "inside", "moved_apart", "moved_back", "read", "tile_numbers"]


def inside(offsets: jax.Array, rows: int) -> jax.Array:
    """The ends of groups, of so many rows."""
    return jax.lax.cummax(jnp.clip(offsets, 0, rows))


@partial(jax.jit, static_argnums=2)
def moved_apart(x: jax.Array, offsets: jax.Array, axis: int = -2) -> jax.Array:
    """What is grouped along ``axis``, each group where it begins with a tile; zeros in between."""
    with jax.enable_x64(True):
        source = apart_source(inside(offsets, x.shape[axis]), x.shape[axis])
        return _taken(x, source, axis)


@partial(jax.jit, static_argnums=(2, 3))
def moved_back(x: jax.Array, offsets: jax.Array, length: int, axis: int = -2) -> jax.Array:
    """The inverse, of so many that there were; zeros past the last group."""
    with jax.enable_x64(True):
        ends = inside(offsets, length)
        inner = jnp.arange(length) < ends[-1]
        position = jnp.where(inner, apart_position(ends, length), x.shape[axis])
        return _taken(x, position, axis)


def tile_numbers(offsets: jax.Array, length: int) -> jax.Array:
    """The group of each tile of what was moved apart, int32."""
    with jax.enable_x64(True):
        return tile_groups(inside(offsets, length), length).astype(jnp.int32)


def as_stored(
    data: jax.Array,
    scale: jax.Array,
    asked: Asked,
    offsets: jax.Array | None,
    shape: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Data and compact scales of an array of ``shape`` as they are kept. Groups along the
    contraction are apart: data that is not ``turned`` moves back, and a block without rows has zero
    for a scale. Scales of squares are those of each row, or column."""
    format, axis, layout, rows = asked.format, asked.axis, asked.layout, shape[-2]
    if asked.square:
        scale = spread_squares(scale, format, axis, shape)
    if axis == -1 and offsets is not None and layout.spreads:
        with jax.enable_x64(True):
            return data, swizzle_scale(scale, axis, layout, inside(offsets, rows))
    if axis == -2 and offsets is not None:
        with jax.enable_x64(True):
            first = apart_source(inside(offsets, rows), rows)[:: format.block_size]
            octets = jnp.where((first < rows)[:, None], as_bytes(scale), 0)
        scale = octets.view(scale.dtype)
        if not format.turned(axis, asked.k_major):
            data = moved_back(data, offsets, rows)
    return data, swizzle_scale(scale, axis, layout, None)


@partial(jax.jit, static_argnums=(1, 2, 3))
def read(
    stored: jax.Array, axis: int, layout: Layout, like: jax.ShapeDtypeStruct, offsets: jax.Array
) -> jax.Array:
    """The inverse, of groups of rows: compact scales ``like`` these."""
    with jax.enable_x64(True):
        ends = inside(offsets, like.shape[-3 - axis])
        return unswizzle_scale(stored, axis, layout, like.shape, like.dtype, ends)


def _taken(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    """These along an axis; zeros for what is beyond."""
    octets = jnp.take(as_bytes(x), index, axis=axis, mode="fill", fill_value=0)
    return octets.view(x.dtype)
