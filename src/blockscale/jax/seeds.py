"""Seeds of stochastic rounding, whose steps may be traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..hadamard import Hadamard
from ..seed import Seed
from .formulas import Steps

__all__ = ["as_seed", "steps_of"]

_WORD = 0xFFFFFFFF


def as_seed(seed: int | Seed) -> Seed:
    return seed if isinstance(seed, Seed) else Seed(seed)


def steps_of(seed: int | Seed | None, hadamard: Hadamard | None = None) -> Steps:
    """What a seed, and the one of a transform's signs, draw by: two uint32 each, the lower one
    first, as JAX has 64 bits switched off."""
    signs = None if hadamard is None else hadamard.for_op()[1]
    return Steps(_words(None if seed is None else as_seed(seed).step), _words(signs))


def _words(step: Any) -> jax.Array | None:
    if step is None:
        return None
    if isinstance(step, int):
        return jnp.asarray([step & _WORD, step >> 32 & _WORD], jnp.uint32)
    low = jnp.asarray(step)
    high = low >> 32 if low.dtype.itemsize == 8 else -(low < 0).astype(jnp.int32)
    return jnp.stack([low.astype(jnp.uint32), high.astype(jnp.uint32)])
