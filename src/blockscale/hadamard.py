"""A Hadamard transform along a contraction: outliers are spread over blocks, and a product of two
operands that are transformed alike is what it was."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .arrays import Array, namespace
from .checks import choose
from .rounding import random_bits

__all__ = ["Hadamard", "check_blocks", "transformed"]

_SIZES = (2, 4, 8, 16, 32, 64, 128)
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Hadamard:
    """An orthogonal transform of each block of ``size`` elements along the contraction: signs, then
    Sylvester's Hadamard matrix over the root of ``size``.

    >>> h = bs.Hadamard.random(seed=1)
    >>> x, g = torch.randn(64, 32), torch.randn(64, 48)
    >>> a, b = (bs.quantize(each, "nvfp4", axis=-2, hadamard=h) for each in (g, x))
    >>> bs.gemm(a.mT, b).shape  # about g.mT @ x, the gradient of a weight
    torch.Size([48, 32])

    Args:
        size: 2 to 128, a power of two; 16 in NVIDIA's recipe for NVFP4.
        signs: bit i says that element i of each block is negated first.

    Raises ValueError for another size and for signs of more elements. Source: arXiv 2509.25149,
    section 4.2.
    """

    size: int = 16
    signs: int = 0

    def __post_init__(self) -> None:
        choose("size", self.size, dict.fromkeys(_SIZES))
        if type(self.signs) is not int or not 0 <= self.signs < 1 << self.size:
            raise ValueError(
                f"signs: got {self.signs!r}; expected an int of {self.size} bits, one for each "
                "element of a block"
            )

    @classmethod
    def random(cls, seed: int, size: int = 16) -> Hadamard:
        """With signs that the seed draws, the same on every machine."""
        choose("size", size, dict.fromkeys(_SIZES))
        bits = random_bits(seed, np.empty(size, np.float32)) & 1
        return cls(size, sum(int(bit) << i for i, bit in enumerate(bits)))

    def for_op(self) -> list[int]:
        """As ops take it: size, low and high 64 bits of signs, as signed integers."""
        words = (self.signs & _MASK, self.signs >> 64)
        return [self.size, *(word - (word >> 63 << 64) for word in words)]

    @classmethod
    def of_op(cls, given: list[int]) -> Hadamard:
        """The inverse of :meth:`for_op`."""
        size, low, high = given
        return cls(size, low & _MASK | (high & _MASK) << 64)


def check_blocks(n: int, size: int, axis: int) -> None:
    """ValueError where blocks of ``size`` do not divide dimension ``axis``, which is ``n``."""
    if n % size:
        raise ValueError(
            f"hadamard: dimension {axis} of x is {n}, not a multiple of {size}; choose a smaller "
            "size, or pad x with zeros"
        )


def transformed(x: Array, hadamard: Hadamard, axis: int) -> Array:
    """fp32 of a float array, transformed along ``axis`` (-1 or -2).

    Bits are those of sums and differences in fp32, of elements that are 1, 2, 4, ... apart, and of
    one product with the fp32 nearest to 1 / sqrt(size), which is exact where size is a power of 4.

    Raises ValueError where blocks do not divide the dimension.
    """
    xp, size, n = namespace(x), hadamard.size, x.shape[axis]
    check_blocks(n, size, axis)
    wide = xp.astype(x, xp.float32)
    if axis == -2:
        wide = xp.matrix_transpose(wide)
    outer = tuple(wide.shape)
    signs = np.array([-1.0 if hadamard.signs >> i & 1 else 1.0 for i in range(size)], np.float32)
    wide = wide.reshape((*outer[:-1], n // size, size)) * xp.asarray(signs, device=x.device)
    apart = 1
    while apart < size:
        pairs = wide.reshape((*outer[:-1], n // (2 * apart), 2, apart))
        one, two = pairs[..., 0, :], pairs[..., 1, :]
        wide = xp.stack((one + two, one - two), axis=-2)
        apart *= 2
    wide = wide.reshape(outer) * float(np.float32(1 / math.sqrt(size)))
    return xp.matrix_transpose(wide) if axis == -2 else wide
