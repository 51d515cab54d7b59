"""The op ``route``: which rows experts have."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..kernels.common.gpu import Unsupported
from ..kernels.common.runtime import gpu_of
from ..kernels.experts import calls as kernels
from .backends import fall_back
from .operation import operation

__all__ = ["route"]


def _fake(experts: Tensor, num_experts: int) -> list[Tensor]:
    count = experts.shape[0] * experts.shape[1]
    return [
        experts.new_empty(count, dtype=torch.int64),
        experts.new_empty(experts.shape, dtype=torch.int64),
        experts.new_empty(num_experts, dtype=torch.int32),
        experts.new_empty(count, dtype=torch.int32),
    ]


@operation(_fake)
def route(experts: Tensor, num_experts: int, backend: str = "auto") -> list[Tensor]:
    """See reference.route."""
    if gpu_of(experts.device) is not None and backend != "reference" and experts.numel():
        try:
            return kernels.route(experts, num_experts)
        except Unsupported as why:
            fall_back("route", experts, backend, str(why))
    return reference.route(experts, num_experts)
