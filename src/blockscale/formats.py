"""Element, scale and block formats, as data.

A block-scaled tensor stores narrow elements and, for each block of them, one shared scale::

    x[i] ~= element[i] * block_scale[block(i)] * global_scale

Everything the library knows about a format is a field of :class:`Format`; code asks the field
instead of the name. Sources: OCP Microscaling Formats (MX) v1.0 (elements: section 5.3, E8M0:
5.4), OCP 8-bit Floating Point (OFP8) v1.0 for E4M3 and E5M2, the PTX ISA on ``mxf4nvf4`` for
NVFP4, and the DeepSeek-V3 report (section 3.3) for 1x128 and 128x128.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from .checks import choose
from .dtypes import FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT8_E8M0FNU, FLOAT32, UINT8, to_torch

if TYPE_CHECKING:
    import torch

__all__ = [
    "BY_WEIGHTS",
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E5M2",
    "E8M0",
    "FP8_BLOCK",
    "FP32",
    "GROUP_TILE",
    "NONFINITE",
    "UE4M3",
    "Element",
    "Format",
    "Scale",
    "formats",
    "get_format",
    "padded_groups",
]

#: Groups along a contraction are moved apart to multiples of so many elements: what tensor cores
#: take at once, and what a tile of scales in layout "tcgen05" has of MXFP8.
GROUP_TILE = 128


@dataclass(frozen=True)
class Element:
    """A narrow sign-magnitude float: ``1 + exponent_bits + mantissa_bits`` bits.

    ``max_code`` is the code (sign cleared) of the largest finite value. ``nan_code`` is the code
    a NaN is written as, or None where the format has no NaN (FP6 and FP4: a NaN is then carried
    by the block's scale). ``inf_code`` exists in E5M2 alone and is only ever read: casts saturate.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    nan_code: int | None = None
    inf_code: int | None = None
    numpy_dtype: np.dtype = UINT8  # of the stored data: uint8 where several codes share bytes

    @cached_property
    def dtype(self) -> torch.dtype:
        """torch's dtype of the stored data."""
        return to_torch(self.numpy_dtype)

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign_code(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value (and of the subnormals' common binade)."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value: 8 for E4M3 (448 = 1.75 * 2^8)."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @property
    def max_significand(self) -> float:
        """Significand of the largest finite value: 1.75 for E4M3."""
        mantissa = self.max_code & ((1 << self.mantissa_bits) - 1)
        return 1.0 + mantissa / (1 << self.mantissa_bits)

    @property
    def max(self) -> float:
        return math.ldexp(self.max_significand, self.max_exponent)

    @property
    def smallest(self) -> float:
        """Smallest positive value: one step of the subnormals."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @property
    def codes_per_group(self) -> int:
        """Codes are stored in groups that fill whole bytes: 1 (8 bits), 4 (6 bits), 2 (4 bits)."""
        return {8: 1, 6: 4, 4: 2}[self.bits]

    @property
    def bytes_per_group(self) -> int:
        return self.codes_per_group * self.bits // 8

    def stored(self, n: int) -> int:
        """Length in stored items of ``n`` elements along the packed axis."""
        return n // self.codes_per_group * self.bytes_per_group

    def elements(self, stored: int) -> int:
        """The inverse of :meth:`stored`."""
        return stored // self.bytes_per_group * self.codes_per_group


# OFP8: E4M3 has no infinity and one NaN (0x7F), so its largest value is 0x7E = 448, not 240.
E4M3 = Element("E4M3", 4, 3, 7, 0x7E, nan_code=0x7F, numpy_dtype=FLOAT8_E4M3FN)
# OFP8: E5M2 follows IEEE 754; 0x7B = 57344, 0x7C is infinity, 0x7D to 0x7F are NaN.
E5M2 = Element("E5M2", 5, 2, 15, 0x7B, nan_code=0x7F, inf_code=0x7C, numpy_dtype=FLOAT8_E5M2)
# MX v1.0: FP6 and FP4 have neither infinity nor NaN; all codes are numbers.
E3M2 = Element("E3M2", 3, 2, 3, 0x1F)  # largest 28
E2M3 = Element("E2M3", 2, 3, 1, 0x1F)  # largest 7.5
E2M1 = Element("E2M1", 2, 1, 1, 0x07)  # 0, 0.5, 1, 1.5, 2, 3, 4, 6


@dataclass(frozen=True)
class Scale:
    """How a block scale is stored, and which roundings of ``amax / element.max`` exist for it."""

    name: str
    numpy_dtype: np.dtype
    nan_code: int  # as unsigned bits of ``dtype``
    max_code: int  # of a block with an infinity under nonfinite="te"
    roundings: tuple[str, ...]  # the first is the default

    @cached_property
    def dtype(self) -> torch.dtype:
        """torch's dtype of the stored scales."""
        return to_torch(self.numpy_dtype)

    @property
    def nbytes(self) -> int:
        return self.numpy_dtype.itemsize


# MX v1.0: byte e means 2^(e - 127); 0 is 2^-127 (there is no zero), 255 is NaN.
E8M0 = Scale("E8M0", FLOAT8_E8M0FNU, 0xFF, 0xFE, ("rceil", "floor", "ceil", "even"))
# E4M3 with the sign always clear; 0 is a scale of zero, 0x7F is NaN.
UE4M3 = Scale("UE4M3", FLOAT8_E4M3FN, 0x7F, 0x7E, ("nearest",))
# fp32, or a power of two held in fp32 where one of E8M0's roundings is asked for.
FP32 = Scale("FP32", FLOAT32, 0x7FC00000, 0x7F000000, ("nearest", *E8M0.roundings))

#: What a NaN or an infinity does to its block: see docs/numerics.md.
NONFINITE = ("propagate", "te")


@dataclass(frozen=True)
class Format:
    """A block-scaled format. ``block`` is (rows, columns) with the contraction as the columns."""

    name: str
    element: Element
    scale: Scale
    block: tuple[int, int]
    has_global_scale: bool = False

    @property
    def block_size(self) -> int:
        """Elements of a block along the contraction."""
        return self.block[1]

    @property
    def squared(self) -> Format:
        """With blocks of as many rows."""
        return replace(self, block=(self.block_size, self.block_size))

    @property
    def bits_per_element(self) -> float:
        return self.element.bits + 8 * self.scale.nbytes / math.prod(self.block)

    @property
    def default_scale_rounding(self) -> str:
        return self.scale.roundings[0]

    def data_shape(
        self, shape: Sequence[int], axis: int, groups: int = 0, apart: bool = False
    ) -> tuple[int, ...]:
        """Shape of the stored data: the contraction is padded to whole blocks and packed.

        With ``groups`` (blocks start anew in each of them) it is not padded; or, if they are moved
        ``apart``, as those of 4 bits are, padded to the length of :func:`padded_groups`.
        """
        out = list(shape)
        if not groups:
            out[axis] = self._padded(out[axis])
        elif apart or self.element.bits < 8:
            out[axis] = padded_groups(out[axis], groups)
        out[axis] = self.element.stored(out[axis])
        return tuple(out)

    def scale_shape(self, shape: Sequence[int], axis: int, groups: int = 0) -> tuple[int, ...]:
        """Shape of the compact scales: ``shape`` over ``block``, rounded up.

        With ``groups``, those of the contraction moved apart as :func:`padded_groups` does.
        """
        out = list(shape)
        n = padded_groups(out[axis], groups) if groups else self._padded(out[axis])
        out[axis] = n // self.block_size
        if len(out) > 1:
            out[-3 - axis] = -(-out[-3 - axis] // self.block[0])
        return tuple(out)

    def turned(self, axis: int, k_major: bool) -> bool:
        """Whether data is stored column by column: packed columns are, others if ``k_major``."""
        return axis == -2 and (k_major or self.element.bits < 8)

    def _padded(self, n: int) -> int:
        return -(-n // self.block_size) * self.block_size

    def multiplies(self, other: Format) -> bool:
        """Whether ``a`` of this format is multiplied by ``b`` of the other one: blocks along K and
        scale types must be the same, but those of some weights."""
        alike = self.block_size == other.block_size and self.scale == other.scale
        return alike or (self.name, other.name) in BY_WEIGHTS


#: Formats whose blocks along K differ: of activations, and of weights of four bits.
BY_WEIGHTS = frozenset({("fp8_1x128", "mxfp4"), ("fp8_1x128", "nvfp4")})


def padded_groups(n: int, groups: int) -> int:
    """Length of a contraction of ``n`` whose groups are moved apart.

    Group i, from ``offsets[i-1]`` on, then begins at
    ``(offsets[i-1] // GROUP_TILE + i) * GROUP_TILE``: room for a partial tile in each, known
    without reading the offsets back. There are zeros in between.
    """
    return (n // GROUP_TILE + groups) * GROUP_TILE


formats: Mapping[str, Format] = MappingProxyType(
    {
        f.name: f
        for f in (
            # OCP MX v1.0, table 1: 32 elements share an E8M0 scale.
            Format("mxfp8", E4M3, E8M0, (1, 32)),
            Format("mxfp8_e5m2", E5M2, E8M0, (1, 32)),
            Format("mxfp6_e3m2", E3M2, E8M0, (1, 32)),
            Format("mxfp6_e2m3", E2M3, E8M0, (1, 32)),
            Format("mxfp4", E2M1, E8M0, (1, 32)),
            # NVFP4: 16 elements share a UE4M3 scale, the tensor an fp32 one.
            Format("nvfp4", E2M1, UE4M3, (1, 16), has_global_scale=True),
            # DeepSeek-V3: fp32 scales, activations and gradients 1x128, weights 128x128.
            Format("fp8_1x128", E4M3, FP32, (1, 128)),
            Format("fp8_128x128", E4M3, FP32, (128, 128)),
        )
    }
)


#: What recipes call a pair of formats: 1x128 blocks, and 128x128 of weights. It is no format.
FP8_BLOCK = "fp8_block"


def get_format(
    format: str | Format, argument: str = "format", others: Sequence[str] = ()
) -> Format:
    """Look a format up by name; a :class:`Format` is passed through.

    Args:
        argument: of the caller, for messages.
        others: what the caller takes beside formats, for messages.

    Raises ValueError for an unknown name and lists the known ones.
    """
    if isinstance(format, Format):
        return format
    if format == FP8_BLOCK:
        raise ValueError(
            f"{argument}: {FP8_BLOCK!r} is a recipe of two formats; choose 'fp8_1x128', or "
            "'fp8_128x128' for weights"
        )
    known: Mapping[str, Any] = {**formats, **dict.fromkeys(others)} if others else formats
    chosen: Format = choose(argument, format, known)
    return chosen
