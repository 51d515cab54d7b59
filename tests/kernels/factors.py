"""What sums are multiplied by, as kernels take it."""

import torch

from blockscale.kernels.common.calls import Alpha

__all__ = ["alpha_of"]


def alpha_of(alpha: tuple[int, ...], value: float) -> Alpha:
    """The scalars of a configuration; their product is ``value`` in fp32."""
    first, second = torch.tensor(value / 4), torch.tensor(4.0)
    return (None, first * second, (first, second))[len(alpha)]
