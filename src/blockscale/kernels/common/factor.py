# mypy: ignore-errors
"""What a product's accumulators are multiplied by, ``alpha``, and what is added to them, a bias.

``alpha`` is an fp32 scalar, or two of them: the global scales of A and B. The kernel multiplies
these by each other first, in fp32, for which torch would start a kernel. In place of a scalar there
may be a vector, which has one for each group.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, cute

from .numeric import NUMERIC
from .tensor_specs import any_tensor

__all__ = ["any_added", "factor_of"]


def any_added(config):
    """Bias and ``alpha`` of a configuration, as kernels are compiled for them: a vector or None;
    a scalar or vector, a pair or None."""
    bias, scalars = config.bias, tuple(any_tensor(Float32, rank, 4) for rank in config.alpha)
    return (
        any_tensor(NUMERIC[bias], 1, bias.itemsize) if bias else None,
        scalars if len(scalars) > 1 else scalars[0] if scalars else None,
    )


def factor_of(alpha, group=None):
    """The number, of a scalar, a pair or what has one for each ``group``."""
    if isinstance(alpha, tuple):
        first, second = (factor_of(each, group) for each in alpha)
        return first * second
    if cute.rank(alpha) == 0:
        return alpha.iterator.load()
    last = alpha.shape[0] - 1
    own = alpha[cutlass.min(group, last)]
    return Float32(cutlass.select_(group <= last, own, Float32(0)))  # the rest is no group
