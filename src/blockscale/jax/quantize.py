"""``quantize``, ``quantize_both`` and ``dequantize``: check what was given, compute, wrap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..formats import Format
from ..hadamard import Hadamard
from ..seed import Seed
from .array import ScaledArray
from .checks import Request, check_global_scale, check_quantize, check_scaled
from .dispatch import encoded
from .dispatch import global_scale as default_global_scale
from .formulas import Asked, Steps
from .seeds import steps_of

__all__ = ["dequantize", "quantize", "quantize_both"]


def quantize(
    x: jax.Array,
    format: str | Format = "mxfp8",
    axis: int = -1,
    *,
    scale_rounding: str | None = None,
    layout: str = "compact",
    nonfinite: str = "propagate",
    global_scale: jax.Array | float | None = None,
    pad: bool = False,
    offsets: jax.Array | None = None,
    seed: int | Seed | None = None,
    square: bool = False,
    hadamard: Hadamard | None = None,
    scaling: str = "amax",
    k_major: bool = False,
) -> ScaledArray:
    """Quantize ``x`` (..., M, K) in blocks along ``axis``: the bytes of torch's side.

    >>> q = bsj.quantize(jax.random.normal(jax.random.key(0), (256, 512)), "mxfp8")
    >>> q.data.shape, q.scale.shape
    ((256, 512), (256, 16))

    Args:
        x: float32, bfloat16 or float16, of two dimensions or more.
        format: a name of :data:`blockscale.formats`.
        axis: the contraction of the product to come: -1 or -2.
        scale_rounding: one of ``format.scale.roundings``, default the first of them.
        layout: where the scales are written; others than "compact" take a matrix.
        nonfinite: "propagate": a NaN or infinity makes its whole block NaN; "te": as Transformer
            Engine, a NaN stays alone and an infinity saturates.
        global_scale: fp32 multiplier that dequantizes, of NVFP4; default ``amax(x) / (448 * 6)``.
            Or ``x.shape[:-2]``, one for each matrix. Positive and finite: a number is looked at, an
            array is not.
        pad: allow a contraction that is no multiple of the block.
        offsets: int32 (groups,), ascending: the end of each expert's rows (dimension -2 of a
            matrix); may be traced, and values are not looked at. With ``axis=-2`` blocks start anew
            in each group (no padding needed), and groups are moved apart to tiles of 128
            (docs/layouts.md), but for 8-bit data that is not ``k_major``; with ``axis=-1`` the
            scales of each group start on a tile in layouts of tiles (tcgen05, packed).
        seed: round elements stochastically, by the bits that this seed has everywhere. Of a
            :class:`blockscale.Seed`, the step may be an int32, uint32 or int64 array (), which may
            be traced.
        square: one scale for each square of elements, of 16 x 16 in NVFP4, 32 x 32 in MXFP8, so
            that both axes have the same elements.
        hadamard: transform ``x`` along ``axis`` before, in fp32: a :class:`blockscale.Hadamard`,
            the same for both operands of a product. The step that draws its signs may be traced.
        scaling: of NVFP4, how a block's scale is chosen, see :class:`blockscale.Quantization`.
        k_major: store 8-bit columns with the contraction contiguous.

    Raises TypeError or ValueError, with the remedy, when it is traced. There is no gradient:
    :func:`linear` is the differentiable way. Source: OCP MX v1.0 section 6.3 with the scale rounded
    up (arXiv 2506.08027).
    """
    how = scale_rounding, layout, nonfinite, pad, k_major, seed, square, scaling, hadamard
    asked = check_quantize(x, Request(format, axis, *how), offsets)
    x, steps = jax.lax.stop_gradient(x), steps_of(seed, hadamard)
    scalar = _global_scale(x, global_scale, steps, asked)
    (quantized,) = _quantized(x, scalar, steps, asked, offsets=offsets)
    return quantized


def quantize_both(
    x: jax.Array,
    format: str | Format = "mxfp8",
    *,
    scale_rounding: str | None = None,
    nonfinite: str = "propagate",
    global_scale: jax.Array | float | None = None,
    pad: bool = False,
    offsets: jax.Array | None = None,
    seed: int | Seed | None = None,
    square: bool = False,
    scaling: str = "amax",
    k_major: bool = False,
) -> tuple[ScaledArray, ScaledArray]:
    """``x`` (..., M, K) quantized along rows (axis -1) and along columns (axis -2), both from high
    precision; NVFP4's global scale is found once.

    >>> rows, columns = bsj.quantize_both(jnp.ones((256, 512)), "mxfp8")

    Takes the arguments of :func:`quantize` but ``axis``, ``layout`` and ``hadamard``: scales are
    compact. Returns the arrays along -1 and along -2; raises as that does.
    """
    how = scale_rounding, "compact", nonfinite, pad, k_major, seed, square, scaling
    both = [check_quantize(x, Request(format, axis, *how), offsets) for axis in (-1, -2)]
    x, steps = jax.lax.stop_gradient(x), steps_of(seed)
    scalar = _global_scale(x, global_scale, steps, both[0])
    rows, columns = _quantized(x, scalar, steps, *both, offsets=offsets)
    return rows, columns


def dequantize(q: ScaledArray, dtype: Any = None) -> jax.Array:
    """``(element * block_scale) * global_scale``, each product rounded once to fp32, then to
    ``dtype`` (that of what was quantized).

    >>> bsj.dequantize(bsj.quantize(jnp.ones((256, 512)), "mxfp8")).shape
    (256, 512)

    Raises TypeError for what is no :class:`ScaledArray`.
    """
    check_scaled("q", q)
    return q.dequantize(dtype)


def _global_scale(
    x: jax.Array, given: jax.Array | float | None, steps: Steps, asked: Asked
) -> jax.Array | None:
    """The global scale that is given, or that of all of ``x``; None of formats without."""
    format = asked.format
    if not format.has_global_scale:
        if given is not None:
            raise ValueError(f"global_scale: {format.name!r} has none; leave it out")
        return None
    if given is None:
        return default_global_scale(x, steps.signs, asked.global_scale)
    check_global_scale(given)
    scalar = jnp.asarray(given, jnp.float32)
    if scalar.shape != x.shape[:-2]:
        if scalar.size != 1:
            raise ValueError(
                f"global_scale: has shape {scalar.shape}; expected one number, or one for each "
                f"matrix, {x.shape[:-2]}"
            )
        scalar = scalar.reshape(())
    return jax.lax.stop_gradient(scalar)


def _quantized(
    x: jax.Array,
    scalar: jax.Array | None,
    steps: Steps,
    *asked: Asked,
    offsets: jax.Array | None,
) -> list[ScaledArray]:
    ends = None if offsets is None else jnp.asarray(offsets)
    parts = encoded(x, scalar, steps, *asked, offsets=ends)
    found = [_wrapped(x, scalar, *pair, each) for pair, each in zip(parts, asked, strict=True)]
    return found if ends is None else [_in_groups(q, ends, x.shape[q.axis]) for q in found]


def _wrapped(
    x: jax.Array, scalar: jax.Array | None, data: jax.Array, scale: jax.Array, asked: Asked
) -> ScaledArray:
    format, size = asked.format, x.shape[asked.axis]
    return ScaledArray(
        data,
        scale,
        scalar,
        format=format.name,
        axis=asked.axis,
        layout=asked.layout.name,
        length=None if size % format.block_size == 0 else size,
        turned=(format.turned(asked.axis, asked.k_major), False),
        dtype=np.dtype(x.dtype),
    )


def _in_groups(q: ScaledArray, offsets: jax.Array, size: int) -> ScaledArray:
    """What was quantized so, along a contraction of so many elements."""
    if q.axis == -1:
        return replace(q, offsets=offsets)
    length = size if q.turned[0] else None  # groups are apart where it is contiguous
    return replace(q, offsets=offsets, k_grouped=True, length=length)
