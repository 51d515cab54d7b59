"""Scales of NVFP4's blocks that are chosen by more than the largest element.

Sums are fp32, of pairs side by side, then of pairs of these: an order that lanes of a warp can
keep.
"""

from __future__ import annotations

from typing import NamedTuple

from .arithmetic import IN_FP32, Arithmetic
from .arrays import Array, namespace
from .blocks import Choose, in_blocks
from .formats import E4M3, UE4M3, Format
from .rounding import (
    LARGEST,
    block_scale,
    decode,
    encode_magnitude,
    float32_bits,
    from_float32_bits,
    multiply,
    scale_bits,
)

__all__ = ["Scaling"]


class Scaling(NamedTuple):
    """How scales of blocks are chosen.

    Attributes:
        name: of ``quantization.SCALINGS``.
        rotated: elements of a block that was transformed before, or 0.
        turned: lines are columns of what is quantized.
        arithmetic: that errors are summed in.
    """

    name: str
    rotated: int
    turned: bool
    arithmetic: Arithmetic = IN_FP32

    def chooser(
        self, format: Format, global_scale: Array | None, noise: Array | None
    ) -> Choose | None:
        """What ``blocks.encode_blocks`` chooses scales by; None where that is the largest
        element."""
        if self.name == "amax":
            return None
        by = ms_eden if self.name == "ms_eden" else least_error

        def choose(finite: Array, amax: Array) -> tuple[Array, Array]:
            drawn = None if noise is None else in_blocks(noise, format)
            return by(Blocks(finite, amax, format, global_scale, drawn), self)

        return choose


class Blocks(NamedTuple):
    """Finite magnitudes in blocks.

    Attributes:
        magnitude: fp32 bits (..., row blocks, rows, column blocks, columns).
        amax: fp32 bits, the same with one row and one column.
        global_scale: fp32 bits.
        noise: uniform 32-bit integers as ``magnitude``, or None.
    """

    magnitude: Array
    amax: Array
    format: Format
    global_scale: Array | None
    noise: Array | None

    def scaled(self, largest: float) -> tuple[Array, Array]:
        """Codes of block scales by which the largest element becomes ``largest``, and fp32 bits of
        magnitudes over them."""
        code, reciprocal = block_scale(
            self.amax, self.format, "nearest", self.global_scale, largest=largest
        )
        return code, multiply(self.magnitude, reciprocal)


def least_error(blocks: Blocks, scaling: Scaling) -> tuple[Array, Array]:
    """Codes of elements and of scales: the largest element of a block becomes the first of
    ``LARGEST``, or a later one where the squared error is then smaller. Source, of 6 and 4:
    Cook et al., arXiv 2512.02010."""
    xp, fp32 = namespace(blocks.magnitude), scaling.arithmetic
    best: tuple[Array, Array, Array] | None = None
    for largest in LARGEST[scaling.name]:
        scale, scaled = blocks.scaled(largest)
        codes = encode_magnitude(scaled, blocks.format.element)
        lost = fp32.subtract(fp32.of(from_float32_bits(scaled)), _values(codes, blocks, fp32))
        squares = xp.moveaxis(fp32.multiply(lost, lost), -3, -2)
        squares = xp.matrix_transpose(squares) if scaling.turned else squares
        *lead, down, across = squares.shape  # both axes of a square have one sum
        sums = _tree_sum(squares.reshape((*lead, down * across)), fp32)[..., None, :, None]
        value = fp32.of(from_float32_bits(scale_bits(scale, UE4M3)))
        error = fp32.multiply(fp32.multiply(sums, value), value)
        if best is not None:
            better = error < best[2]
            codes, scale, error = (
                xp.where(better, *pair) for pair in zip((codes, scale, error), best, strict=True)
            )
        best = codes, scale, error
    assert best is not None
    return best[0], best[1]


def ms_eden(blocks: Blocks, scaling: Scaling) -> tuple[Array, Array]:
    """Codes of elements, rounded to nearest, and of scales, which are corrected so that transformed
    blocks have the right length along what they were, and then rounded stochastically. Source:
    MS-EDEN, arXiv 2601.22813."""
    assert blocks.noise is not None
    xp, fp32, rotated = namespace(blocks.magnitude), scaling.arithmetic, scaling.rotated
    scale, scaled = blocks.scaled(*LARGEST["ms_eden"])
    codes = encode_magnitude(scaled, blocks.format.element)
    *lead, count, size = scaled.shape
    groups = *lead, count * size // rotated, rotated
    given = fp32.of(from_float32_bits(scaled)).reshape(groups)
    made = _values(codes, blocks, fp32).reshape(groups)
    along = _tree_sum(fp32.multiply(given, made), fp32)
    length = _tree_sum(fp32.multiply(given, given), fp32)
    factor = xp.where(along > 0, fp32.divide(length, along), 1)
    factor = xp.repeat(float32_bits(fp32.floats(factor)), rotated // size, axis=-1)[..., None]
    corrected = multiply(scale_bits(scale, UE4M3), factor)
    return codes, encode_magnitude(corrected, E4M3, blocks.noise[..., :1])


def _values(codes: Array, blocks: Blocks, fp32: Arithmetic) -> Array:
    xp = namespace(codes)
    return fp32.of(decode(xp.astype(codes, xp.uint8), blocks.format.element))


def _tree_sum(x: Array, fp32: Arithmetic) -> Array:
    """Along the last dimension, a power of two."""
    while x.shape[-1] > 1:
        x = fp32.add_pairs(x)
    return x[..., 0]
