# mypy: ignore-errors
"""What a product's accumulators are multiplied by, ``alpha``, and what is added to them, a bias.

``alpha`` is an fp32 scalar, or two of them: the global scales of A and B. The kernel multiplies
these by each other first, in fp32, for which torch would start a kernel.
"""

from __future__ import annotations

from cutlass import Float32

from .numeric import NUMERIC
from .tensor_specs import any_tensor

__all__ = ["any_added", "factor_of"]


def any_added(config):
    """Bias and ``alpha`` of a configuration, as kernels are compiled for them: a vector or None;
    a scalar, a pair or None."""
    bias, scalars = config.bias, tuple(any_tensor(Float32, 0, 4) for _ in range(config.alpha))
    return (
        any_tensor(NUMERIC[bias], 1, bias.itemsize) if bias else None,
        scalars if len(scalars) > 1 else scalars[0] if scalars else None,
    )


def factor_of(alpha):
    """The number, of a scalar or a pair."""
    if isinstance(alpha, tuple):
        first, second = (each.iterator.load() for each in alpha)
        return first * second
    return alpha.iterator.load()
