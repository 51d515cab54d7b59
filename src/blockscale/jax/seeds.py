"""Seeds of stochastic rounding, whose steps may be traced."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ..seed import Numbers, Seed
from .cut import Cut, Dims

__all__ = ["as_seed", "step_words", "words_of_shard"]

_WORD = 0xFFFFFFFF


def as_seed(seed: int | Seed) -> Seed:
    return seed if isinstance(seed, Seed) else Seed(seed)


def step_words(seed: int | Seed | None) -> jax.Array | None:
    """The 64 bits of a seed's step as two uint32, the lower one first, as JAX has 64 bits switched
    off; None where nothing is rounded stochastically."""
    if seed is None:
        return None
    step = as_seed(seed).step
    if isinstance(step, int):
        return jnp.asarray([step & _WORD, step >> 32 & _WORD], jnp.uint32)
    low = jnp.asarray(step)
    high = low >> 32 if low.dtype.itemsize == 8 else -(low < 0).astype(jnp.int32)
    return jnp.stack([low.astype(jnp.uint32), high.astype(jnp.uint32)])


def words_of_shard(
    step: jax.Array, seed: Numbers, shape: Sequence[int], cut: Cut, dims: Dims
) -> jax.Array:
    """The words of a step, and those of the index that the first element of this device's shard,
    which has ``shape``, has in the whole array."""
    strides = [seed.matrix] * (len(shape) - 2) + [seed.row, 1]
    if len(shape) > 3:  # of leading dimensions, the first alone is cut
        strides[0] *= math.prod(shape[1:-2])
    with jax.enable_x64(True):
        first = jnp.asarray(seed.first, jnp.int64)
        for factor, size, stride in zip(dims, shape, strides, strict=True):
            if factor is not None and cut.parts(factor.name) > 1:
                index = jax.lax.axis_index(cut.axes[factor.name])
                first += index.astype(jnp.int64) * (size * stride)
        words = jnp.stack([first & _WORD, first >> 32 & _WORD]).astype(jnp.uint32)
    return jnp.concatenate([step, words])
