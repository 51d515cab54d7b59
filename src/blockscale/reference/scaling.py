"""Scales of NVFP4's blocks that are chosen by more than the largest element.

Sums are fp32, of pairs side by side, then of pairs of these: an order that lanes of a warp can
keep.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import E4M3, UE4M3, Format
from ..rounding import (
    LARGEST,
    block_scale,
    decode,
    encode_magnitude,
    float32_bits,
    from_float32_bits,
    multiply,
    scale_bits,
)

__all__ = ["Blocks", "least_error", "ms_eden"]


class Blocks(NamedTuple):
    """Finite magnitudes in blocks.

    Attributes:
        magnitude: fp32 bits (..., row blocks, rows, column blocks, columns).
        amax: fp32 bits, the same with one row and one column.
        global_scale: fp32 bits.
        noise: uniform 32-bit integers as ``magnitude``, or None.
        turned: rows are columns of what is quantized.
    """

    magnitude: Tensor
    amax: Tensor
    format: Format
    global_scale: Tensor | None
    noise: Tensor | None
    turned: bool

    def scaled(self, largest: float) -> tuple[Tensor, Tensor]:
        """Codes of block scales by which the largest element becomes ``largest``, and fp32 bits of
        magnitudes over them."""
        code, reciprocal = block_scale(
            self.amax, self.format, "nearest", self.global_scale, largest=largest
        )
        return code, multiply(self.magnitude, reciprocal)


def least_error(blocks: Blocks, name: str) -> tuple[Tensor, Tensor]:
    """Codes of elements and of scales: the largest element of a block becomes the first of
    ``LARGEST[name]``, or a later one where the squared error is then smaller. Source, of 6 and 4:
    Cook et al., arXiv 2512.02010."""
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for largest in LARGEST[name]:
        scale, scaled = blocks.scaled(largest)
        codes = encode_magnitude(scaled, blocks.format.element)
        lost = from_float32_bits(scaled) - _values(codes, blocks.format)
        squares = (lost * lost).transpose(-3, -2)  # (..., row blocks, column blocks, rows, columns)
        squares = squares.mT if blocks.turned else squares  # both axes of a square have one sum
        sums = _tree_sum(squares.flatten(-2))
        value = from_float32_bits(scale_bits(scale, UE4M3))
        error = sums[..., None, :, None] * value * value
        if best is not None:
            better = error < best[2]
            codes, scale, error = (
                torch.where(better, *pair) for pair in zip((codes, scale, error), best, strict=True)
            )
        best = codes, scale, error
    assert best is not None
    return best[0], best[1]


def ms_eden(blocks: Blocks, rotated: int) -> tuple[Tensor, Tensor]:
    """Codes of elements, rounded to nearest, and of scales, which are corrected so that transformed
    blocks of ``rotated`` elements have the right length along what they were, and then rounded
    stochastically. Source: MS-EDEN, arXiv 2601.22813."""
    assert blocks.noise is not None
    scale, scaled = blocks.scaled(*LARGEST["ms_eden"])
    codes = encode_magnitude(scaled, blocks.format.element)
    *lead, count, size = scaled.shape
    groups = *lead, count * size // rotated, rotated
    given, made = (
        each.reshape(groups) for each in (from_float32_bits(scaled), _values(codes, blocks.format))
    )
    along = _tree_sum(given * made)
    factor = torch.where(along > 0, _tree_sum(given * given) / along, 1)
    factor = factor.repeat_interleave(rotated // size, -1)[..., None]
    corrected = multiply(scale_bits(scale, UE4M3), float32_bits(factor))
    return codes, encode_magnitude(corrected, E4M3, blocks.noise[..., :1])


def _values(codes: Tensor, format: Format) -> Tensor:
    return decode(codes.to(torch.uint8), format.element)


def _tree_sum(x: Tensor) -> Tensor:
    """Along the last dimension, a power of two."""
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]
