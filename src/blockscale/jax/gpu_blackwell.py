"""Products on Blackwell: which kernels, and their arguments. ``ends``: the output, bias and
alpha."""

from __future__ import annotations

from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp

from ..kernels.common.epilogue import Epilogue
from ..kernels.sm100 import config as sm100_config
from ..layouts import TILE_ROWS, Grouped, get_layout
from ..layouts.base import as_bytes
from .gpu_operand import Operand
from .groups import inside
from .target import Target

__all__ = ["columns", "grouped", "multiplied"]

_TILES = get_layout("tcgen05")


def multiplied(
    a: Operand, b: Operand, epilogue: Epilogue, ends: tuple[Any, ...], target: Target
) -> jax.Array:
    """``alpha * A @ B.mT + bias``."""
    names, shape = (a.name or "", b.name or ""), (a.data.shape[0], b.data.shape[0], b.k)
    config = sm100_config.choose_config(shape, names, epilogue, gpu=target.gpu)
    return target.launch(config, *_given(a, b), *ends, None, None)[0]


def grouped(
    a: Operand,
    b: Operand,
    offsets: jax.Array,
    epilogue: Epilogue,
    ends: tuple[Any, ...],
    target: Target,
) -> jax.Array:
    """The product of each group of rows of A by its matrix of B."""
    m, (groups, n, _), names = a.data.shape[0], b.data.shape, (a.name or "", b.name or "")
    each = -(-m // groups), n, b.k
    config = sm100_config.choose_grouped(each, groups, names, epilogue, gpu=target.gpu)
    spread = Grouped(_TILES)
    rows = jnp.pad(b.compact(), ((0, 0), (0, -n % TILE_ROWS), (0, 0)))
    b_tiles = _TILES.swizzle(rows.reshape(-1, rows.shape[-1]))
    with jax.enable_x64(True):  # it counts rows so
        a_tiles = spread.swizzle(a.compact(), inside(offsets, m))
    down = spread.padded_rows(m, groups) // TILE_ROWS, rows.shape[1] // TILE_ROWS * groups
    left, right = _loadable(a), _loadable(b).reshape(groups * n, -1)
    band = sm100_config.supergroup(config, target.gpu)
    given = left, _down(a_tiles, down[0]), right, _down(b_tiles, down[1])
    return target.launch(config, *given, *ends, offsets, band)[0]


def columns(
    a: Operand,
    b: Operand,
    offsets: jax.Array,
    epilogue: Epilogue,
    ends: tuple[Any, ...],
    target: Target,
) -> jax.Array:
    """The product of each group of columns of A and B, one below the other."""
    names, groups = (a.name or "", b.name or ""), offsets.shape[0]
    each = a.data.shape[0], b.data.shape[0], -(-b.k // groups)
    how: dict[str, Any] = {"grouping": "k", "gpu": target.gpu}
    config = sm100_config.choose_grouped(each, groups, names, epilogue, **how)
    band = sm100_config.supergroup(config, target.gpu)
    return target.launch(config, *_given(a, b), *ends, offsets, band)[0]


def _given(a: Operand, b: Operand) -> tuple[jax.Array, ...]:
    """Data and tiles of scales of both."""
    given = ((_loadable(x), _down(_tiles(x), -(-x.data.shape[0] // TILE_ROWS))) for x in (a, b))
    return tuple(chain.from_iterable(given))


def _loadable(x: Operand) -> jax.Array:
    """Data with K padded by zeros to whole tiles of scales, if it has four bits: TMA wants that of
    what it unpacks, and of rows that start at multiples of some bytes."""
    assert x.format is not None
    if x.format.element.bits == 8:
        return x.data
    tile = x.format.element.stored(4 * x.format.block_size)
    return jnp.pad(x.data, ((0, 0),) * (x.data.ndim - 1) + ((0, -x.data.shape[-1] % tile),))


def _tiles(x: Operand) -> jax.Array:
    assert x.scale is not None
    return x.scale if x.layout == "tcgen05" else _TILES.swizzle(x.compact())


def _down(tiles: jax.Array, count: int) -> jax.Array:
    """So many rows of tiles, as bytes."""
    return as_bytes(tiles).reshape(count, -1)
