"""Shards of quantized arrays joined: a quarter or half of the bytes of bfloat16 on the way."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from ..checks import check_axis
from ..formats import Format, get_format
from ..hadamard import Hadamard
from ..quantization import check_scaling
from . import dispatch
from .array import ScaledArray
from .checks import check_scaled, check_values, transform_of
from .formulas import GlobalScale, global_scale_of, largest_finite
from .seeds import steps_of

__all__ = ["all_gather", "global_scale"]


def all_gather(q: ScaledArray, axis_name: str, dimension: int = -2) -> ScaledArray:
    """Join the shards of ``axis_name`` along ``dimension``, in ``jax.shard_map``: elements and
    scales as they are, so that the bytes are those of the whole that is quantized.

    >>> whole = bsj.all_gather(bsj.quantize(x, "mxfp8"), "data")  # of rows
    >>> whole = bsj.all_gather(bsj.quantize(x, "mxfp8", axis=-2), "data")  # of columns

    Args:
        q: a shard; its scales are compact.
        dimension: of the values: -2 (rows), -1 or a leading one. Along the contraction shards hold
            whole blocks.

    Shards of NVFP4 have to share a global scale (:func:`global_scale`); where they do not, that of
    the result is NaN, and so are all of its values. Raises TypeError or ValueError, with the
    remedy, when it is traced.
    """
    check_scaled("q", q)
    if q.offsets is not None:
        raise ValueError("q: has groups, whose ends are those of a shard; quantize without offsets")
    if q.global_scale is not None and q.global_scale.ndim:
        raise ValueError("q: has a global scale for each matrix; gather with one for all")
    if q.layout != "compact":
        raise ValueError(f"q: has layout {q.layout!r}; gather compact scales: quantize without")
    dimension = dimension - q.ndim if dimension >= 0 else dimension
    if not -q.ndim <= dimension < 0:
        raise ValueError(f"dimension: got {dimension}; expected one of {q.ndim}")
    if dimension == q.axis and q.length is not None:
        raise ValueError(
            f"q: its contraction of {q.length} is padded, and shards would be joined with padding "
            f"between; let shards hold multiples of {q.kind.block_size}"
        )
    if dimension != q.axis and dimension >= -2 and q.shape[dimension] % q.kind.block[0]:
        raise ValueError(
            f"q: blocks of {q.format!r} have {q.kind.block[0]} rows, and shards {q.shape}; let "
            "them hold whole blocks"
        )
    data, scale = (
        jax.lax.all_gather(x, axis_name, axis=_place(dimension, turned) + x.ndim, tiled=True)
        for x, turned in zip((q.data, q.scale), q.turned, strict=True)
    )
    scalar = q.global_scale
    if scalar is not None:
        alike = jax.lax.pmax(scalar, axis_name) == jax.lax.pmin(scalar, axis_name)
        scalar = jnp.where(alike, scalar, jnp.nan)
    return replace(q, data=data, scale=scale, global_scale=scalar)


def global_scale(
    x: jax.Array,
    format: str | Format,
    axis_name: str | None = None,
    *,
    axis: int = -1,
    hadamard: Hadamard | None = None,
    scaling: str = "amax",
) -> jax.Array:
    """The global scale of ``x``, or of all of its shards: ``amax / (448 * 6)`` in NVFP4.

    >>> q = bsj.quantize(x, "nvfp4", global_scale=bsj.global_scale(x, "nvfp4", "data"))

    ``axis``, ``hadamard`` and ``scaling`` are those of :func:`quantize`. Raises TypeError or
    ValueError as that, and ValueError for formats without one.
    """
    kind, axis = get_format(format), check_axis(axis)
    if not kind.has_global_scale:
        raise ValueError(f"format: {kind.name!r} has no global scale")
    check_scaling(scaling, kind)
    check_values(x)
    asked = GlobalScale(kind, scaling, transform_of(hadamard, x.shape, axis), axis)
    x, step = jax.lax.stop_gradient(x), steps_of(None, hadamard).signs
    if axis_name is None:
        return dispatch.global_scale(x, step, asked)
    return global_scale_of(jax.lax.pmax(largest_finite(x, step, asked), axis_name), asked)


def _place(dimension: int, turned: bool) -> int:
    """Where a dimension of the values is, counted from the end."""
    return -3 - dimension if turned and dimension >= -2 else dimension
