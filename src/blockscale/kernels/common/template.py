"""What plans keep to allocate outputs from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["template"]


def template(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without memory: empty_like of it is the fastest way to allocate.

    Were there a byte of it, a plan that is made while a CUDA graph is captured would keep memory of
    the graph's pool, and torch.compile(mode="reduce-overhead") would refuse the graph.
    """
    # of one dimension: empty_like of (1, 1) takes over its strides, which kernels read, as they are
    made = torch.empty(1, dtype=dtype, device=device).expand(tuple(shape))
    made.untyped_storage().resize_(0)
    return made
