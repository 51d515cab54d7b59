"""By the compiled loops where JAX computes on a CPU, else by formulas: the same bytes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from ..formats import Format
from ..kernels.cpu import xla as loops
from ..layouts import get_layout
from ..layouts.scales import swizzle_scale, unswizzle_scale
from . import formulas
from .formulas import Asked, Stored

__all__ = ["decoded", "encoded", "global_scale", "multiplied"]


@partial(jax.jit, static_argnums=2)
def encoded(x: jax.Array, scalar: jax.Array | None, asked: Asked) -> tuple[jax.Array, jax.Array]:
    """As ``formulas.encoded``."""
    by_formulas = partial(formulas.encoded, asked=asked)
    if asked.seed is not None or not _takes(asked.format, scalar):
        return by_formulas(x, scalar)

    def by_loops(x: jax.Array, scalar: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        format, axis = asked.format, asked.axis
        how = {"scale_rounding": asked.scale_rounding, "nonfinite": asked.nonfinite}
        data, scale = loops.quantize(x, format, axis=axis, global_scale=scalar, **how)
        if format.turned(axis, asked.k_major) and not format.turned(axis, False):
            data = jnp.swapaxes(data, -1, -2)
        scale = scale.view(format.scale.numpy_dtype)
        return (
            data.view(format.element.numpy_dtype),
            swizzle_scale(scale, axis, asked.layout, None),
        )

    return jax.lax.platform_dependent(x, scalar, cpu=by_loops, default=by_formulas)


@partial(jax.jit, static_argnums=3)
def decoded(
    data: jax.Array, scale: jax.Array, scalar: jax.Array | None, stored: Stored
) -> jax.Array:
    """As ``formulas.decoded``; what lies turned is turned by who reads it."""
    by_formulas = partial(formulas.decoded, stored=stored)
    if not _takes(stored.format, scalar):
        return by_formulas(data, scale, scalar)

    def by_loops(data: jax.Array, scale: jax.Array, scalar: jax.Array | None) -> jax.Array:
        format, axis, shape = stored.format, stored.axis, stored.shape
        compact, dtype = format.scale_shape(shape, axis), format.scale.numpy_dtype
        scale = unswizzle_scale(scale, axis, get_layout(stored.layout), compact, dtype, None)
        turned = stored.turned[0]
        if turned:
            shape, axis = (*shape[:-2], shape[-1], shape[-2]), -3 - axis
        if turned != stored.turned[1]:
            scale = jnp.swapaxes(scale, -1, -2)
        values = loops.dequantize(
            _octets(data), _octets(scale), format, shape=shape, axis=axis, global_scale=scalar
        )
        return jnp.swapaxes(values, -1, -2) if turned else values

    return jax.lax.platform_dependent(data, scale, scalar, cpu=by_loops, default=by_formulas)


@partial(jax.jit, static_argnums=1)
def global_scale(x: jax.Array, format: Format) -> jax.Array:
    """The global scale of all of ``x``."""

    def by_formulas(x: jax.Array) -> jax.Array:
        return formulas.default_global_scale(formulas.largest_finite(x), format)

    by_loops = partial(loops.global_scale, format=format)
    return jax.lax.platform_dependent(x, cpu=by_loops, default=by_formulas)


def multiplied(
    x: jax.Array, data: jax.Array, scale: jax.Array, scalar: jax.Array | None, format: Format
) -> jax.Array:
    """``x @ w.mT`` in fp32, of a few rows by a weight (N, K) that is stored along K, with compact
    scales."""

    def by_values(x: jax.Array, *parts: jax.Array | None) -> jax.Array:
        how = Stored(format, -1, "compact", (data.shape[0], x.shape[-1]), (False, False))
        w = formulas.decoded(*parts, how)
        return jnp.matmul(x, w.mT, precision=jax.lax.Precision.HIGHEST)

    def by_loops(
        x: jax.Array, data: jax.Array, scale: jax.Array, scalar: jax.Array | None
    ) -> jax.Array:
        return loops.multiply(x, _octets(data), _octets(scale), format, global_scale=scalar)

    return jax.lax.platform_dependent(x, data, scale, scalar, cpu=by_loops, default=by_values)


def _takes(format: Format, scalar: jax.Array | None) -> bool:
    """Whether the loops do; of global scales they take one."""
    return loops.supported(format) and (scalar is None or scalar.ndim == 0)


def _octets(x: jax.Array) -> jax.Array:
    return x.view(jnp.uint8) if x.dtype.itemsize == 1 else x
