# mypy: ignore-errors
"""What a product's sums are multiplied by: ``alpha``, an fp32 scalar, or two of them.

Two are the global scales of A and B: the kernel multiplies these by each other first, in fp32, for
which torch would start a kernel.
"""

from __future__ import annotations

from cutlass import Float32

from ..gpu.any_tensor import any_tensor

__all__ = ["any_factor", "factor_of"]


def any_factor(count: int):
    """``alpha``, as kernels are compiled for it: None, a scalar, or a pair."""
    scalars = tuple(any_tensor(Float32, 0, 4) for _ in range(count))
    return scalars if count > 1 else scalars[0] if scalars else None


def factor_of(alpha):
    """The number, of a scalar or a pair."""
    if isinstance(alpha, tuple):
        first, second = (each.iterator.load() for each in alpha)
        return first * second
    return alpha.iterator.load()
