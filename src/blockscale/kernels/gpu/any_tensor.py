# mypy: ignore-errors
"""Tensors of any shape, as the compiler of CuTe DSL wants them described."""

from __future__ import annotations

from cutlass import cute
from cutlass.cute.runtime import make_fake_tensor

__all__ = ["any_tensor"]


def any_tensor(dtype, rank: int, align: int, spaced: bool = False):
    """A tensor of any shape, ``align`` bytes aligned; ``spaced``: each of its rows is, too."""
    sizes = tuple(cute.sym_int32() for _ in range(rank))
    apart = cute.sym_int64(divisibility=align * 8 // dtype.width if spaced else 1)
    return make_fake_tensor(dtype, sizes, (apart, 1)[2 - rank :], assumed_align=align)
