"""Blocks along the last axis of an array: their scales and elements, in integers.

Arrays are torch's, numpy's or, where it has 64 bits, JAX's. Everything that quantizes is compared
with this, through :mod:`blockscale.reference` or :mod:`blockscale.jax`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .arrays import Array, bits_as, device_of, namespace
from .formats import FP32, Format
from .rounding import (
    FP32_INF,
    block_scale,
    decode,
    decode_scale,
    encode_magnitude,
    float32_bits,
    from_float32_bits,
    multiply,
)

__all__ = [
    "Choose",
    "decode_blocks",
    "encode_blocks",
    "finite_amax",
    "in_blocks",
    "spread_squares",
    "store_scale",
]

#: Given finite magnitudes in blocks and the largest of each, as bits: codes of elements and scales.
Choose = Callable[[Array, Array], tuple[Array, Array]]


def encode_blocks(
    x: Array,
    format: Format,
    *,
    scale_rounding: str = "rceil",
    nonfinite: str = "propagate",
    global_scale: Array | None = None,
    noise: Array | None = None,
    choose: Choose | None = None,
) -> tuple[Array, Array]:
    """uint8 codes of ``x`` (..., M, K), one an element and padded along the last axis, and int64
    codes of scales (..., M / rows, K / columns of a block).

    ``global_scale``: bits, which have the dimensions of blocks; ``noise``: what is rounded up by,
    one for each element, or None for nearest even; ``choose``: of scales and elements, where that
    is not by the largest element.
    """
    xp, element = namespace(x), format.element
    lead, rows, columns = x.shape[:-1], x.shape[-2] if x.ndim > 1 else 1, x.shape[-1]
    bits = in_blocks(float32_bits(x), format)
    magnitude, sign = bits & 0x7FFFFFFF, (bits >> 31) * element.sign_code
    is_nan, is_inf = magnitude > FP32_INF, magnitude == FP32_INF

    finite = xp.where(is_nan | is_inf, 0, magnitude)
    amax = xp.max(finite, axis=(-3, -1), keepdims=True)
    if choose is not None:
        codes, scale = choose(finite, amax)
    else:
        scale, reciprocal = block_scale(amax, format, scale_rounding, global_scale)
        noise = None if noise is None else in_blocks(noise, format)
        codes = encode_magnitude(multiply(finite, reciprocal), element, noise)
    codes = codes | sign

    block_nan, block_inf = (xp.any(each, axis=(-3, -1), keepdims=True) for each in (is_nan, is_inf))
    nan = element.max_code if element.nan_code is None else element.nan_code
    if nonfinite == "propagate":  # the block's scale says NaN; so does each element that can
        bad = block_nan | block_inf
        scale = xp.where(bad, format.scale.nan_code, scale)
        codes = xp.where(bad, element.nan_code or 0, codes)
    else:  # as Transformer Engine: a NaN stays alone, an infinity saturates and takes the scale
        scale = xp.where(block_inf, format.scale.max_code, scale)
        codes = xp.where(block_inf, 0, codes)
        codes = xp.where(is_inf, element.max_code | sign, codes)
        codes = xp.where(is_nan, nan, codes)

    *outer, down, height, across, width = codes.shape
    padded = codes.reshape((*outer, down * height, across * width))[..., :rows, :]
    scale = scale.reshape((*outer, down, across))
    whole = across * width if columns else 0
    return (
        xp.astype(padded.reshape((*lead, whole)), xp.uint8),
        scale if x.ndim > 1 else scale.reshape((across,)),
    )


def in_blocks(x: Array, format: Format) -> Array:
    """(..., M, K) -> (..., row blocks, rows, column blocks, columns), padded with zeros."""
    xp, (rows, columns) = namespace(x), format.block
    x = x if x.ndim > 1 else x.reshape((1, -1))
    for axis, size in ((-2, rows), (-1, columns)):
        if missing := -x.shape[axis] % size:
            shape = list(x.shape)
            shape[axis] = missing
            x = xp.concat(
                [x, xp.zeros(tuple(shape), dtype=x.dtype, device=device_of(x))], axis=axis
            )
    *outer, m, k = x.shape
    return x.reshape((*outer, m // rows, rows, k // columns, columns))


def finite_amax(x: Array) -> Array:
    """The largest finite magnitude of ``x``, an fp32 scalar; 0 where there is none."""
    xp, magnitude = namespace(x), float32_bits(x) & 0x7FFFFFFF
    return from_float32_bits(xp.max(xp.where(magnitude >= FP32_INF, 0, magnitude)))


def store_scale(code: Array, format: Format) -> Array:
    """Codes of scales in the dtype that the format stores them in."""
    if format.scale is FP32:
        return from_float32_bits(code)
    xp = namespace(code)
    return bits_as(xp.astype(code, xp.uint8), format.scale.numpy_dtype)


def spread_squares(scale: Array, format: Format, axis: int, shape: Sequence[int]) -> Array:
    """Bytes of scales of squares, as the rows (``axis`` -1) or columns of a matrix have them."""
    xp, other = namespace(scale), -3 - axis
    spread = xp.repeat(scale, format.block_size, axis=other)
    return spread[..., : shape[-2], :] if other == -2 else spread[..., : shape[-1]]


def decode_blocks(
    codes: Array,
    scale: Array,
    format: Format,
    *,
    global_scale: Array | None = None,
    block: Array | None = None,
) -> Array:
    """fp32 bits of ``(element * block_scale) * global_scale``, each product rounded once.

    ``codes`` (..., M, K) uint8, one an element; ``scale`` compact, as it is stored;
    ``global_scale``: bits, which have the dimensions of ``codes``; ``block``: the column of
    ``scale`` of each of K, where blocks do not follow each other from the first on.
    """
    xp, (rows, columns) = namespace(codes), format.block
    factors = float32_bits(decode_scale(scale, format.scale))
    factors = xp.repeat(factors, columns, axis=-1) if block is None else factors[..., block]
    if rows > 1 and codes.ndim > 1:
        factors = xp.repeat(factors, rows, axis=-2)[..., : codes.shape[-2], :]
    bits = multiply(float32_bits(decode(codes, format.element)), factors)
    return bits if global_scale is None else multiply(bits, global_scale)
