"""Seeds of stochastic rounding, whose steps may be traced."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..seed import Seed

__all__ = ["as_seed", "step_words"]

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
