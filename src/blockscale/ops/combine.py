"""The op ``combine``: what tokens get of their experts."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..kernels.common.gpu import Unsupported
from ..kernels.common.runtime import gpu_of
from ..kernels.experts import calls as experts
from .backends import fall_back
from .gemm_operands import detached
from .operation import operation

__all__ = ["combine"]


def _fake(y: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    return y.new_empty(slots.shape[0], y.shape[1], dtype=dtype)


@operation(_fake)
def combine(
    y: Tensor, slots: Tensor, weights: Tensor | None, dtype: torch.dtype, backend: str = "auto"
) -> Tensor:
    """See reference.combine."""
    if gpu_of(y.device) is not None and backend != "reference" and y.numel() and slots.numel():
        weights = None if weights is None else detached(weights).to(torch.float32)
        try:
            return experts.combine(detached(y), slots, weights, dtype)
        except Unsupported as why:
            fall_back("combine", y, backend, str(why))
    return reference.combine(y, slots, weights, dtype)
