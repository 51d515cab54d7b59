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

from .. import hadamard
from ..arithmetic import IN_FP64
from ..blocks import decode_blocks, encode_blocks, finite_amax, store_scale
from ..formats import Format
from ..hadamard import Hadamard
from ..layouts import Layout, get_layout
from ..layouts.scales import unswizzle_scale
from ..philox import random_bits
from ..rounding import (
    float32_bits,
    from_float32_bits,
    global_scale_from_amax,
    multiply,
    pack,
    unpack,
)
from ..scaling import Scaling
from ..seed import Numbers
from .groups import as_stored, moved_apart

__all__ = [
    "FLOATS",
    "Asked",
    "GlobalScale",
    "Steps",
    "Stored",
    "decoded",
    "encoded",
    "global_scale_of",
    "largest_finite",
    "times",
    "transformed",
]

#: Names of dtypes that are quantized, and that results are rounded to.
FLOATS = ("float32", "bfloat16", "float16")


class Asked(NamedTuple):
    """How an array is quantized.

    Attributes:
        seed: elements are rounded stochastically so, in a step that is told beside.
        hadamard: numbers of ``Hadamard.for_op``, whose step, too, is told beside.
    """

    format: Format
    axis: int
    scale_rounding: str
    layout: Layout
    nonfinite: str
    k_major: bool
    seed: Numbers | None
    square: bool
    scaling: str
    hadamard: tuple[int, ...] | None

    @property
    def blocked(self) -> Format:
        """The format, with the blocks that have one scale."""
        return self.format.squared if self.square else self.format

    @property
    def global_scale(self) -> GlobalScale:
        return GlobalScale(self.format, self.scaling, self.hadamard, self.axis)


class GlobalScale(NamedTuple):
    """How a global scale is found, by the names of :class:`Asked`."""

    format: Format
    scaling: str = "amax"
    hadamard: tuple[int, ...] | None = None
    axis: int = -1


class Steps(NamedTuple):
    """What seeds draw by, two words each (``seeds.steps_of``); None where nothing is drawn.

    Attributes:
        elements: of what is rounded stochastically; of a shard, the index of its first element in
            the whole array, too (``seeds.of_shard``).
        signs: of a transform.
    """

    elements: jax.Array | None = None
    signs: jax.Array | None = None


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


@partial(jax.jit, static_argnums=4)
def encoded(
    x: jax.Array,
    scalar: jax.Array | None,
    steps: Steps,
    offsets: jax.Array | None,
    asked: Asked,
) -> tuple[jax.Array, jax.Array]:
    """Data and scales of ``x``, as they are stored; ``offsets``: the end of each group of rows."""
    format, axis, shape, noise = asked.format, asked.axis, x.shape, None
    with jax.enable_x64(True):
        if asked.seed is not None:
            noise = random_bits(_numbers(asked.seed, steps.elements), x)
        x = transformed(x, steps.signs, asked)
        if offsets is not None and axis == -2:
            x = moved_apart(x, offsets)
            noise = None if noise is None else moved_apart(noise, offsets)
        noise = None if noise is None else _turn(noise, axis == -2)
        bits = None if scalar is None else _of_matrices(scalar, 4)
        size = 0 if asked.hadamard is None else asked.hadamard[0]
        scaling = Scaling(asked.scaling, size, axis == -2, IN_FP64)
        codes, scale = encode_blocks(
            _turn(x, axis == -2),
            asked.blocked,
            scale_rounding=asked.scale_rounding,
            nonfinite=asked.nonfinite,
            global_scale=bits,
            noise=noise,
            choose=scaling.chooser(asked.blocked, bits, noise),
        )
        data = pack(codes, format.element)
        data = _turn(data, axis == -2 and not format.turned(axis, asked.k_major))
        stored = _turn(store_scale(scale, format), axis == -2)
        return as_stored(data, stored, asked, offsets, shape)


def transformed(x: jax.Array, step: jax.Array | None, asked: Asked | GlobalScale) -> jax.Array:
    """``x``, or what a transform before makes of it, fp32, with signs drawn in a step."""
    return x if asked.hadamard is None else _transformed(x, step, asked.hadamard, asked.axis)


@partial(jax.jit, static_argnums=(2, 3))
def _transformed(
    x: jax.Array, step: jax.Array | None, numbers: tuple[int, ...], axis: int
) -> jax.Array:
    with jax.enable_x64(True):
        transform = Hadamard.of_op(numbers, _joined(step))
        assert transform is not None
        return hadamard.transformed(x, transform, axis, IN_FP64)


def _joined(words: jax.Array | None) -> Any:
    """The 64 bits of two words."""
    if words is None:
        return None
    low, high = words.astype(jnp.int64)
    return low | high << 32


def _numbers(seed: Numbers, words: jax.Array | None) -> Numbers:
    """In a step, and of a shard where its first element is told beside that."""
    assert words is not None
    seed = seed._replace(step=_joined(words[:2]))
    return seed if len(words) == 2 else seed._replace(first=_joined(words[2:]))


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


@partial(jax.jit, static_argnums=2)
def largest_finite(x: jax.Array, step: jax.Array | None, asked: GlobalScale) -> jax.Array:
    """The largest finite magnitude of what is quantized, fp32; ``step``: of a transform's signs."""
    x = transformed(x, step, asked)
    with jax.enable_x64(True):
        return finite_amax(x)


@partial(jax.jit, static_argnums=1)
def global_scale_of(amax: jax.Array, asked: GlobalScale) -> jax.Array:
    """The global scale of an array whose largest finite magnitude is ``amax``."""
    with jax.enable_x64(True):
        return global_scale_from_amax(amax, asked.format, asked.scaling)


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
