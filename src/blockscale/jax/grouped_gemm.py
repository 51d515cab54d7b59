"""Products of groups: of rows, each by its own matrix, or along the contraction."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..formats import GROUP_TILE
from . import gpu_gemm
from .array import ScaledArray
from .checks import check_grouped, check_out_dtype
from .dispatch import by_platform, on_target, target_of
from .gemm import exact_values
from .groups import inside, tile_numbers
from .target import Target
from .varying import alike

__all__ = ["grouped_gemm"]


def grouped_gemm(
    a: ScaledArray | jax.Array, b: ScaledArray, offsets: jax.Array, out_dtype: Any = None
) -> jax.Array:
    """One product a group (expert): of rows (fprop, dgrad), each group by its matrix, where rows
    past the last group are zero; or along K (wgrad), where an empty group gives zeros.

    >>> ends = jnp.array([96, 256], jnp.int32)
    >>> x, w = jnp.ones((256, 512)), jnp.ones((2, 128, 512))
    >>> bsj.grouped_gemm(bsj.quantize(x, "mxfp8"), bsj.quantize(w, "mxfp8").mT, ends).shape
    (256, 128)
    >>> columns = {"axis": -2, "offsets": ends, "k_major": True}
    >>> x, g = (bsj.quantize(jnp.ones((256, n)), "mxfp8", **columns) for n in (512, 128))
    >>> bsj.grouped_gemm(g.mT, x, ends).shape
    (2, 128, 512)

    Args:
        a: (M, K), blocked along axis -1; where rows are grouped, it may be plain bfloat16.
        b: (G, K, N), blocked along axis -2, for groups of rows; (K, N) for groups along K, of
            which both are quantized with these offsets along ``axis=-2``. Kernels take 8 bits so
            with ``k_major=True`` only.
        offsets: int32 (G,), ascending: the end of each group. Its values are not looked at.
        out_dtype: bfloat16 (default), float16 or float32.

    Returns (M, N), or (G, M, N) of groups along K. Raises TypeError or ValueError, with the remedy,
    when it is traced.
    """
    along_k = check_grouped(a, b, offsets)
    ends, out = jnp.asarray(offsets), check_out_dtype(out_dtype)
    if along_k and isinstance(a, ScaledArray):
        return _of_columns(a, b, ends, out)
    return _of_rows(a, b, ends, out)


def _of_rows(
    a: ScaledArray | jax.Array, b: ScaledArray, offsets: jax.Array, out: np.dtype
) -> jax.Array:
    a = a.ungrouped() if isinstance(a, ScaledArray) else a
    target = target_of("grouped_gemm", partial(gpu_gemm.unsupported, a, b, out, groups=b.shape[0]))

    def by_values(a: ScaledArray | jax.Array, b: ScaledArray, offsets: jax.Array) -> jax.Array:
        return _each_by_its_own(exact_values(a), exact_values(b), offsets).astype(out)

    def by_kernels(
        target: Target, a: ScaledArray | jax.Array, b: ScaledArray, offsets: jax.Array
    ) -> jax.Array:
        return gpu_gemm.grouped(a, b, offsets, out, target)

    return by_platform(on_target(target, by_kernels), by_values)(a, b, offsets)


def _each_by_its_own(a: jax.Array, b: jax.Array, offsets: jax.Array) -> jax.Array:
    """Products of all rows by one matrix after the other, of which each group keeps its own:
    ``lax.ragged_dot`` multiplies zeros by the others on a CPU, where NaN of one is all groups', and
    makes a copy of the rows for each."""
    ends, row = inside(offsets, a.shape[0]), jnp.arange(a.shape[0], dtype=jnp.int32)[:, None]

    def choose(y: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        matrix, start, end = group
        found = jnp.matmul(a, matrix, precision=jax.lax.Precision.HIGHEST)
        return jnp.where((row >= start) & (row < end), found, y), None

    groups = b, jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends
    start, *_ = alike(jnp.zeros((a.shape[0], b.shape[-1]), jnp.float32), a, *groups)
    return jax.lax.scan(choose, start, groups)[0]


def _of_columns(a: ScaledArray, b: ScaledArray, offsets: jax.Array, out: np.dtype) -> jax.Array:
    why_not = partial(gpu_gemm.unsupported_columns, a, b, out, offsets.shape[0])
    target, length = target_of("grouped_gemm", why_not), a.shape[-1]

    def by_values(a: ScaledArray, b: ScaledArray, offsets: jax.Array) -> jax.Array:
        values = exact_values(a), exact_values(b)
        return _sums(*values, tile_numbers(offsets, length), offsets.shape[0]).astype(out)

    def by_kernels(target: Target, a: ScaledArray, b: ScaledArray, offsets: jax.Array) -> jax.Array:
        return gpu_gemm.columns(a, b, offsets, out, target)

    product = by_platform(on_target(target, by_kernels), by_values)
    return product(a.ungrouped(), b.ungrouped(), offsets)


def _sums(a: jax.Array, b: jax.Array, group: jax.Array, groups: int) -> jax.Array:
    """The sum of products of the tiles along K that each group has: ``lax.ragged_dot_general``
    makes a copy of both operands for each group on a CPU."""
    m, n = a.shape[0], b.shape[1]
    tiles = a.reshape(m, -1, GROUP_TILE).swapaxes(0, 1), b.reshape(-1, GROUP_TILE, n), group

    def add(sums: jax.Array, tile: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x, y, i = tile
        return sums.at[i].add(jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)), None

    start, *_ = alike(jnp.zeros((groups, m, n), jnp.float32), *tiles)
    return jax.lax.scan(add, start, tiles)[0]
