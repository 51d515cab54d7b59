"""The formulas of the library, compiled by XLA.

They are integer arithmetic (:mod:`blockscale.blocks`), which neither fast math nor flushed
subnormals nor excess precision can change. They need 64 bits, which are switched on while they are
traced, for them alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..blocks import decode_blocks, encode_blocks, finite_amax, store_scale
from ..formats import Format
from ..layouts import Layout, get_layout
from ..layouts.scales import swizzle_scale, unswizzle_scale
from ..philox import random_bits
from ..rounding import (
    float32_bits,
    from_float32_bits,
    global_scale_from_amax,
    multiply,
    pack,
    unpack,
)
from ..seed import Numbers

__all__ = [
    "FLOATS",
    "Asked",
    "Stored",
    "decoded",
    "default_global_scale",
    "encoded",
    "largest_finite",
    "times",
]

#: Names of dtypes that are quantized, and that results are rounded to.
FLOATS = ("float32", "bfloat16", "float16")


class Asked(NamedTuple):
    """How an array is quantized.

    Attributes:
        seed: elements are rounded stochastically so, in a step that is told beside.
    """

    format: Format
    axis: int
    scale_rounding: str
    layout: Layout
    nonfinite: str
    k_major: bool
    seed: Numbers | None


class Stored(NamedTuple):
    """Tells how a quantized array lies in memory, by the names of ``ScaledArray``."""

    format: Format
    axis: int
    layout: str
    shape: tuple[int, ...]
    turned: tuple[bool, bool]

    @property
    def lying(self) -> tuple[tuple[int, ...], int]:
        """Shape and axis of the array whose data this is as it lies in memory: the transposed one,
        if data is turned."""
        if not self.turned[0]:
            return self.shape, self.axis
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]), -3 - self.axis


@partial(jax.jit, static_argnums=3)
def encoded(
    x: jax.Array, scalar: jax.Array | None, step: jax.Array | None, asked: Asked
) -> tuple[jax.Array, jax.Array]:
    """Data and scales of ``x``, as they are stored; ``step``: as of ``seeds.step_words``, or of a
    shard, ``seeds.words_of_shard``."""
    format, axis = asked.format, asked.axis
    with jax.enable_x64(True):
        noise = None
        if asked.seed is not None and step is not None:
            words = step.astype(jnp.int64)
            seed = asked.seed._replace(step=words[0] | words[1] << 32)
            if len(words) > 2:
                first: Any = words[2] | words[3] << 32
                seed = seed._replace(first=first)
            noise = random_bits(seed, x)
        codes, scale = encode_blocks(
            _turn(x, axis == -2),
            format,
            scale_rounding=asked.scale_rounding,
            nonfinite=asked.nonfinite,
            global_scale=None if scalar is None else _of_matrices(scalar, 4),
            noise=None if noise is None else _turn(noise, axis == -2),
        )
        data = pack(codes, format.element)
        data = _turn(data, axis == -2 and not format.turned(axis, asked.k_major))
        stored = _turn(store_scale(scale, format), axis == -2)
        return data, swizzle_scale(stored, axis, asked.layout, None)


@partial(jax.jit, static_argnums=3)
def decoded(
    data: jax.Array, scale: jax.Array, scalar: jax.Array | None, stored: Stored
) -> jax.Array:
    """fp32 values."""
    format, axis, shape = stored.format, stored.axis, stored.shape
    with jax.enable_x64(True):
        codes = unpack(_turn(data, stored.turned[0] != (axis == -2)), format.element)
        compact = format.scale_shape(shape, axis)
        layout, dtype = get_layout(stored.layout), format.scale.numpy_dtype
        scale = unswizzle_scale(scale, axis, layout, compact, dtype, None)
        scale = _turn(scale, stored.turned[1] != (axis == -2))
        scalar = None if scalar is None else _of_matrices(scalar, 2)
        bits = decode_blocks(codes, scale, format, global_scale=scalar)
        return _turn(from_float32_bits(bits)[..., : shape[axis]], axis == -2)


@jax.jit
def largest_finite(x: jax.Array) -> jax.Array:
    """The largest finite magnitude, fp32."""
    with jax.enable_x64(True):
        return finite_amax(x)


@partial(jax.jit, static_argnums=1)
def default_global_scale(amax: jax.Array, format: Format) -> jax.Array:
    """The global scale of an array whose largest finite magnitude is ``amax``."""
    with jax.enable_x64(True):
        return global_scale_from_amax(amax, format)


@jax.jit
def times(x: jax.Array, factors: jax.Array) -> jax.Array:
    """The product of fp32 arrays, each rounded once, subnormals kept."""
    with jax.enable_x64(True):
        return from_float32_bits(multiply(float32_bits(x), float32_bits(factors)))


def _of_matrices(scalar: jax.Array, dims: int) -> jax.Array:
    """Bits of a global scale, or of one for each matrix, which has so many dimensions."""
    bits = float32_bits(scalar)
    return bits.reshape(*bits.shape, *[1] * dims) if bits.ndim else bits


def _turn(x: jax.Array, turned: bool) -> jax.Array:
    return jnp.swapaxes(x, -1, -2) if turned else x
