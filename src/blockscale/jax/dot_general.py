"""``lax.dot_general`` with quantized operands, and the signatures of jax.nn's scaled products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .checks import Formats, formats_of
from .formulas import times
from .linear import product

__all__ = ["dot_general", "scaled_dot_general", "scaled_matmul"]

_Dimensions = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: _Dimensions,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    format: str = "mxfp8",
    gradients: str | None = None,
    **_: Any,
) -> jax.Array:
    """``jax.lax.dot_general`` by :func:`linear`'s product, gradients too.

    >>> layer = nnx.Linear(512, 256, dot_general=bsj.dot_general, rngs=nnx.Rngs(0))
    >>> nvfp4 = functools.partial(bsj.dot_general, format="nvfp4")

    Args:
        lhs, rhs, dimension_numbers, preferred_element_type: as of ``jax.lax.dot_general``. One
            operand of two that have no dtype in common is cast first.
        precision: not looked at: sums are fp32.
        format, gradients: as of :func:`linear`; ``lhs`` has activations, ``rhs`` weights.

    Raises TypeError or ValueError, with the remedy, when it is traced.
    """
    formats = formats_of(format, gradients)
    dtype = jnp.result_type(lhs, rhs)
    out = dtype if preferred_element_type is None else preferred_element_type
    return _product(lhs.astype(dtype), rhs.astype(dtype), dimension_numbers, formats, out)


def scaled_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: _Dimensions,
    preferred_element_type: Any = jnp.float32,
    configs: Sequence[Any] | None = None,
    implementation: Any = None,
) -> jax.Array:
    """``jax.nn.scaled_dot_general``, on a CPU, too.

    >>> configs = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3
    >>> x, w = jnp.ones((2, 8, 64)), jnp.ones((2, 4, 64))
    >>> bsj.scaled_dot_general(x, w, (((2,), (2,)), ((0,), (0,))), configs=configs).shape
    (2, 8, 4)

    Args:
        configs: of lhs, rhs and gradients, each of ``jax.nn.get_scaled_dot_general_config`` or a
            format's name; None for ``jax.lax.dot_general``. Global scales of NVFP4 are found here.
        implementation: not looked at, as there.

    Raises ValueError for configurations that are no formats of ours.
    """
    if configs is None:
        return jax.lax.dot_general(
            lhs, rhs, dimension_numbers, preferred_element_type=preferred_element_type
        )
    if len(configs) != 3:
        raise ValueError(f"configs: got {len(configs)}; expected those of lhs, rhs and gradients")
    names = [getattr(each, "mode", each) for each in configs]
    if names[0] != names[1]:
        raise ValueError(f"configs: got {names[0]!r} and {names[1]!r}; lhs and rhs have one format")
    formats = formats_of(names[0], names[2])
    return _product(lhs, rhs, dimension_numbers, formats, preferred_element_type)


def scaled_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scales: jax.Array,
    rhs_scales: jax.Array,
    preferred_element_type: Any = jnp.float32,
) -> jax.Array:
    """``jax.nn.scaled_matmul``, on a CPU, too: ``lhs`` times ``rhs`` turned, in blocks.

    >>> x, scales = jnp.ones((1, 8, 64), jnp.float8_e4m3fn), jnp.ones((1, 8, 2), jnp.float8_e8m0fnu)
    >>> bsj.scaled_matmul(x, x, scales, scales).shape
    (1, 8, 8)

    Args:
        lhs, rhs: (B, M, K) and (B, N, K), of float8 or float4 dtypes.
        lhs_scales, rhs_scales: (B, M, K / block) and (B, N, K / block).
        preferred_element_type: of the result, (B, M, N); sums are fp32.

    Raises ValueError where scales do not divide K.
    """
    if lhs.shape[:1] != rhs.shape[:1]:
        raise ValueError(f"lhs, rhs: have {lhs.shape[0]} and {rhs.shape[0]} matrices; pass as many")
    values = [
        _scaled(name, x, scales)
        for name, x, scales in (("lhs", lhs, lhs_scales), ("rhs", rhs, rhs_scales))
    ]
    acc = jnp.einsum("bmk,bnk->bmn", *values, precision=jax.lax.Precision.HIGHEST)
    return acc.astype(preferred_element_type)


def _scaled(name: str, x: jax.Array, scales: jax.Array) -> jax.Array:
    """fp32 values, rounded once: by integers, as XLA flushes subnormal products."""
    if x.ndim != 3 or scales.shape[:-1] != x.shape[:-1] or x.shape[-1] % scales.shape[-1]:
        raise ValueError(
            f"{name}: has shape {x.shape}, its scales {scales.shape}; expected (B, rows, K) and "
            "(B, rows, K / block)"
        )
    factors = jnp.repeat(scales.astype(jnp.float32), x.shape[-1] // scales.shape[-1], axis=-1)
    return times(x.astype(jnp.float32), factors)


def _product(
    lhs: jax.Array, rhs: jax.Array, numbers: _Dimensions, formats: Formats, out_dtype: Any
) -> jax.Array:
    """Multiply what is brought to (batch, M, K) and (batch, K, N)."""
    (left_k, right_k), (left_batch, right_batch) = (
        tuple(tuple(each) for each in pair) for pair in numbers
    )
    for name, left_axes, right_axes in (
        ("contracting", left_k, right_k),
        ("batch", left_batch, right_batch),
    ):
        pair = tuple(lhs.shape[i] for i in left_axes), tuple(rhs.shape[i] for i in right_axes)
        if pair[0] != pair[1]:
            raise ValueError(
                f"dimension_numbers: {name} dimensions of lhs have sizes {pair[0]}, of rhs "
                f"{pair[1]}; name dimensions that match one by one"
            )
    left_free = _others(lhs.ndim, left_k, left_batch)
    right_free = _others(rhs.ndim, right_k, right_batch)

    def sizes(x: jax.Array, axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(x.shape[i] for i in axes)

    lead = [left_batch] if left_batch else []
    left = lhs.transpose((*left_batch, *left_free, *left_k))
    right = rhs.transpose((*right_batch, *right_k, *right_free))
    y = product(
        _merged(left, [*lead, left_free, left_k]),
        _merged(right, [*lead, right_k, right_free]),
        formats,
        out_dtype,
    )
    whole = [sizes(lhs, left_batch)] if lead else []
    whole += sizes(lhs, left_free), sizes(rhs, right_free)
    for place in reversed(range(len(whole))):
        y = y.reshape((*y.shape[:place], *whole[place], *y.shape[place + 1 :]))
    return y


def _merged(x: jax.Array, groups: Sequence[Sequence[int]]) -> jax.Array:
    """Each group of neighbouring dimensions as one: one group after the other, as JAX follows
    through a reshape no more of what explicit axes of a mesh cut."""
    for place, group in enumerate(groups):
        merged = math.prod(x.shape[place : place + len(group)])
        x = x.reshape((*x.shape[:place], merged, *x.shape[place + len(group) :]))
    return x


def _others(ndim: int, *taken: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i for i in range(ndim) if all(i not in each for each in taken))
