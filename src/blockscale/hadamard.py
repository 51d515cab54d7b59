"""A Hadamard transform along a contraction: outliers are spread over blocks, and a product of two
operands that are transformed alike is what it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import IN_FP32, Arithmetic
from .arrays import Array, device_of, namespace
from .checks import choose
from .philox import random_bits
from .seed import Numbers, Seed

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Hadamard", "check_transform", "transformed"]

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
    >>> drawn = bs.Hadamard(128, signs=bs.Seed(7, torch.tensor(0)))  # of what the tensor has then

    Args:
        size: 2 to 128, a power of two; 16 in NVIDIA's recipe for NVFP4.
        signs: bit i says that element i of each block is negated first. Or a :class:`Seed` that
            draws them, the same on every machine: bit i is the lowest random bit of element i. Of a
            step that is an int they are drawn here, once, and become bits; of a step in a tensor
            where ``x`` is transformed, by kernels in passing: a replay of a CUDA graph has signs of
            what is in it by then.

    Raises ValueError for another size, for signs of more elements, and for a seed of a part
    (``origin``). Source: arXiv 2509.25149, section 4.2.
    """

    size: int = 16
    signs: int | Seed = 0

    def __post_init__(self) -> None:
        choose("size", self.size, dict.fromkeys(_SIZES))
        signs = self.signs
        if isinstance(signs, Seed):
            if signs.origin:
                raise ValueError(
                    f"signs: got a seed of origin={signs.origin}; all blocks have the same signs, "
                    "of a part of x, too: leave out origin and shape"
                )
            if type(signs.step) is int:
                object.__setattr__(self, "signs", _bits(signs, self.size))
        elif type(signs) is not int or not 0 <= signs < 1 << self.size:
            raise ValueError(
                f"signs: got {signs!r}; expected an int of {self.size} bits, one for each element "
                "of a block, or a blockscale.Seed(value, step) that draws them"
            )

    @classmethod
    def random(cls, seed: int, size: int = 16) -> Hadamard:
        """With signs that the seed draws, the same on every machine."""
        return cls(size, Seed(seed))

    @property
    def draws(self) -> bool:
        """Whether signs are drawn where it is done, by a step in a tensor."""
        return isinstance(self.signs, Seed)

    def for_op(self) -> tuple[list[int], Tensor | None]:
        """As ops take it: size, low and high 64 bits of signs, as signed integers; or, where these
        are drawn, size and value, and the step."""
        signs = self.signs
        if isinstance(signs, Seed):
            return [self.size, signs.value], signs.step  # type: ignore[return-value]
        words = (signs & _MASK, signs >> 64)
        return [self.size, *(word - (word >> 63 << 64) for word in words)], None

    @classmethod
    def of_op(cls, given: Sequence[int] | None, step: Array | None) -> Hadamard | None:
        """The inverse of :meth:`for_op`; None of nothing."""
        if given is None:
            return None
        if step is not None:
            size, value = given
            return cls(size, Seed(value, step))
        size, low, high = given
        return cls(size, low & _MASK | (high & _MASK) << 64)


def _drawn(seed: Seed, like: Array) -> Array:
    """Signs of the elements of a block, as bits."""
    return random_bits(Numbers(seed.value, seed.step, 0, 0, 0), like) & 1


def _bits(seed: Seed, size: int) -> int:
    bits = _drawn(seed, np.empty(size, np.float32))
    return sum(int(bit) << i for i, bit in enumerate(bits))


def check_transform(
    hadamard: object, shape: Sequence[int], axis: int, orders: Sequence[str] = ()
) -> None:
    """TypeError unless it is one; ValueError where its blocks do not divide dimension ``axis``, or
    go along rows that arguments, whose names are ``orders``, put elsewhere."""
    if not isinstance(hadamard, Hadamard):
        raise TypeError(
            f"hadamard: got {type(hadamard).__name__}; expected blockscale.Hadamard(...) or None"
        )
    for name in orders if axis == -2 else ():
        raise ValueError(
            f"hadamard: goes along the rows that {name} names (axis=-2), which is not there; "
            f"transform each group's rows by themselves, without {name}"
        )
    _check_blocks(shape[axis], hadamard.size, axis)


def _check_blocks(n: int, size: int, axis: int) -> None:
    if n % size:
        raise ValueError(
            f"hadamard: dimension {axis} of x is {n}, not a multiple of {size}; choose a smaller "
            "size, or pad x with zeros"
        )


def transformed(x: Array, hadamard: Hadamard, axis: int, arithmetic: Arithmetic = IN_FP32) -> Array:
    """fp32 of a float array, transformed along ``axis`` (-1 or -2).

    Bits are those of sums and differences in fp32, of elements that are 1, 2, 4, ... apart, and of
    one product with the fp32 nearest to 1 / sqrt(size), which is exact where size is a power of 4.

    Raises ValueError where blocks do not divide the dimension.
    """
    xp, size, n = namespace(x), hadamard.size, x.shape[axis]
    _check_blocks(n, size, axis)
    lines = arithmetic.of(xp.matrix_transpose(x) if axis == -2 else x)
    outer = tuple(lines.shape)
    factors = arithmetic.of(_factors(hadamard, x))
    lines = arithmetic.multiply(lines.reshape((*outer[:-1], n // size, size)), factors)
    apart = 1
    while apart < size:
        pairs = lines.reshape((*outer[:-1], n // (2 * apart), 2, apart))
        one, two = pairs[..., 0, :], pairs[..., 1, :]
        lines = xp.stack((arithmetic.add(one, two), arithmetic.subtract(one, two)), axis=-2)
        apart *= 2
    root = xp.full((), 1 / math.sqrt(size), dtype=xp.float32, device=device_of(x))
    wide = arithmetic.floats(arithmetic.multiply(lines.reshape(outer), arithmetic.of(root)))
    return xp.matrix_transpose(wide) if axis == -2 else wide


def _factors(hadamard: Hadamard, x: Array) -> Array:
    """1 or -1 of each element of a block, fp32, where ``x`` is."""
    xp, size, signs = namespace(x), hadamard.size, hadamard.signs
    if isinstance(signs, Seed):
        drawn = _drawn(signs, xp.empty(size, dtype=xp.float32, device=device_of(x)))
        return xp.astype(1 - 2 * drawn, xp.float32)
    bits = np.array([-1.0 if signs >> i & 1 else 1.0 for i in range(size)], np.float32)
    return xp.asarray(bits, device=device_of(x))
