"""Seeds of stochastic rounding, whose steps may be traced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..hadamard import Hadamard
from ..seed import Numbers, Seed
from .cut import Cut, Dims
from .formulas import Steps

__all__ = ["as_seed", "of_shard", "steps_of"]

_WORD = 0xFFFFFFFF


def as_seed(seed: int | Seed) -> Seed:
    """A seed. TypeError for a part whose place is an array, by which nothing can be traced."""
    found = seed if isinstance(seed, Seed) else Seed(seed)
    if any(isinstance(n, jax.Array) for n in (*found.origin, *found.shape)):
        raise TypeError(
            f"seed: has origin={found.origin} and shape={found.shape}; expected ints, which are "
            "known when a function is traced: give each shard a step of its own instead, "
            "blockscale.Seed(value, step * shards + jax.lax.axis_index(name))"
        )
    return found


def steps_of(seed: int | Seed | None, hadamard: Hadamard | None = None) -> Steps:
    """What a seed, and the one of a transform's signs, draw by: two uint32 each, the lower one
    first, as JAX has 64 bits switched off."""
    signs = None if hadamard is None else hadamard.for_op()[1]
    return Steps(
        None if seed is None else _words(as_seed(seed).step),
        None if signs is None else _words(signs),
    )


def _words(step: Any) -> jax.Array:
    if isinstance(step, int):
        return jnp.asarray([step & _WORD, step >> 32 & _WORD], jnp.uint32)
    if not isinstance(step, jax.Array):
        raise TypeError(
            f"seed: its step is a {type(step).__name__} of another library; expected an int, or an "
            "int32, uint32 or int64 jax.Array: pass int(step)"
        )
    with jax.enable_x64(True):  # else an int64 loses its high word
        high = step >> 32 if step.dtype.itemsize == 8 else -(step < 0).astype(jnp.int32)
        return jnp.stack([step.astype(jnp.uint32), high.astype(jnp.uint32)])


def of_shard(steps: Steps, seed: Numbers, shape: Sequence[int], cut: Cut, dims: Dims) -> Steps:
    """With the words of the index that the first element of this device's shard, which has
    ``shape``, has in the whole array."""
    strides = [seed.matrix] * (len(shape) - 2) + [seed.row, 1]
    if len(shape) > 3:  # of leading dimensions, the first alone is cut
        strides[0] *= math.prod(shape[1:-2])
    with jax.enable_x64(True):
        first = jnp.asarray(seed.first, jnp.int64)
        for factor, size, stride in zip(dims, shape, strides, strict=True):
            if factor is not None and cut.parts(factor.name) > 1:
                index = jax.lax.axis_index(cut.axes[factor.name])
                first += index.astype(jnp.int64) * (size * stride)
    assert steps.elements is not None
    return steps._replace(elements=jnp.concatenate([steps.elements, _words(first)]))
