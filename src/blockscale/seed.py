"""What decides which elements are rounded up: a seed, a step, and where a tensor lies in a whole
one. Rounding is a function of these and of an element's index in the whole, nothing else, so that
threads, tiles and ranks change no bit."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Numbers", "Seed", "for_op", "numbers_of"]


_LIMIT = 2**63
_JAX_STEPS = ("int32", "uint32", "int64")
_OR_COUNTER = ", or an int64 tensor of no dimensions (with JAX, an int32, uint32 or int64 array)"


class Numbers(NamedTuple):
    """A seed as loops take it. The elements of the ``r``-th row of the ``m``-th matrix have indices
    from ``first + m * matrix + r * row`` on. ``step`` is an int, or a tensor that has it."""

    value: int
    step: Any
    first: int
    row: int
    matrix: int

    @property
    def fours(self) -> bool:
        """Whether four elements that follow each other, from a multiple of four on, share a call of
        Philox."""
        return not any(n % 4 for n in (self.first, self.row, self.matrix))


@dataclass(frozen=True)
class Seed:
    """Of stochastic rounding: the same elements are rounded up on every machine, by any number of
    threads, and on ranks that have parts of a tensor as if one had all of it.

    >>> x = torch.randn(256, 128)
    >>> whole = bs.quantize(x, seed=bs.Seed(7, step=3))
    >>> part = bs.quantize(x[128:], seed=bs.Seed(7, step=3, origin=(128, 0), shape=x.shape))
    >>> torch.equal(part.qdata.view(torch.uint8), whole.qdata[128:].view(torch.uint8))
    True

    Args:
        value: 64 bits; a number of its own for each tensor that is rounded in a step.
        step: 64 bits; another one rounds otherwise. ``Seed(7)`` is ``seed=7``. Or an int64 tensor
            () on the device of what is rounded, which is read there when that happens: a replay of
            a CUDA graph reads what is in it by then. With JAX, an int32, uint32 or int64 array ().
        origin, shape: of a part: the index of its first element in the whole tensor, and the shape
            of that. A part of a batch may begin and end anywhere along the first dimension, and
            along the last two.

    Raises ValueError for numbers of more than 64 bits, for other tensors, and for one of ``origin``
    and ``shape`` without the other. Source: Philox4x32-10 (Salmon et al., SC 2011), whose counter
    is an element's index / 4 and the step, and whose key is the value.
    """

    value: int
    step: int | Tensor = 0
    origin: Sequence[int] = ()
    shape: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("value", "step"):
            given = getattr(self, name)
            number = type(given) is int and -_LIMIT <= given < _LIMIT
            if not number and not (name == "step" and _is_counter(given)):
                other = _OR_COUNTER if name == "step" else ""
                raise ValueError(f"seed: has {name}={given!r}; expected a 64-bit int{other}")
        object.__setattr__(self, "origin", tuple(self.origin))
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.origin) != len(self.shape):
            raise ValueError(
                f"seed: got origin={self.origin} and shape={self.shape}; expected an index in the "
                "whole tensor and the shape of that, or neither"
            )

    def numbers(self, shape: Sequence[int]) -> Numbers:
        """Of a tensor of ``shape``; ValueError where that is no such part of the whole one."""
        if not self.shape:
            return _of_whole(self.value, self.step, shape)
        own, whole, origin = tuple(shape), self.shape, self.origin
        if len(whole) != len(own) or any(
            not 0 <= begin <= begin + size <= end
            for begin, size, end in zip(origin, own, whole, strict=True)
        ):
            raise ValueError(
                f"seed: origin {origin} and shape {whole} leave no room for x, which is {own}"
            )
        if own[1:-2] != whole[1:-2]:
            raise ValueError(
                f"seed: x {own} is a part of {whole} along other dimensions than the first and the "
                "last two; quantize it in parts, or reshape both"
            )
        first = sum(at * math.prod(whole[d + 1 :]) for d, at in enumerate(origin))
        return _of_whole(self.value, self.step, whole)._replace(first=first)


def _is_counter(step: Any) -> bool:
    """Whether it is a tensor that has a step, or an array of JAX."""
    jax, dtype = sys.modules.get("jax"), str(getattr(step, "dtype", ""))
    known = dtype == "torch.int64" or (
        jax is not None and isinstance(step, jax.Array) and dtype in _JAX_STEPS
    )
    return known and not len(step.shape)


def for_op(seed: int | Seed | None, shape: Sequence[int]) -> tuple[list[int] | None, Any]:
    """Numbers of a tensor of ``shape`` and, where that is a tensor, the step, as ops take them."""
    if seed is None:
        return None, None
    numbers = numbers_of(seed, shape)
    if type(seed) is Seed and type(seed.step) is not int:
        return list(numbers._replace(step=0)), numbers.step
    return list(numbers), None


def numbers_of(seed: int | Seed, shape: Sequence[int]) -> Numbers:
    """Of a tensor of ``shape``; an int is the seed of a whole one."""
    if isinstance(seed, Seed):
        return seed.numbers(shape)
    return _of_whole(seed, 0, shape)


def _of_whole(value: int, step: int | Tensor, shape: Sequence[int]) -> Numbers:
    return Numbers(value, step, 0, shape[-1] if len(shape) else 1, math.prod(shape[-2:]))
