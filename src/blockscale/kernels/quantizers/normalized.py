"""A norm of rows and quantization along any axis: statistics first, then a read that makes both."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dtypes import from_torch
from ..common.gpu import Gpu, Unsupported
from ..common.runtime import Described, describe, gpu_of
from .config import Request
from .plan import as_matrix, unsupported
from .statistics_config import Places, choose_statistics, most_columns_of_statistics

__all__ = ["RowStatistics", "row_statistics"]


class RowStatistics(NamedTuple):
    """``producer`` makes normalized rows of x and ``vector``, which has ``mean`` and ``rstd``."""

    producer: str
    vector: Tensor
    mean: Tensor | None
    rstd: Tensor


def row_statistics(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    request: Request,
    *,
    eps: float,
    centered: bool,
    gpu: Gpu | None = None,
) -> RowStatistics:
    """What the quantizer of ``request`` needs to normalize ``x`` (M, K): ``reference.layernorm``
    if ``centered``, else ``reference.rmsnorm``, whose mean and rstd it has to the bit.

    ``gpu``: to choose the kernel for where ``x`` is on a CPU, for the emulator. Raises Unsupported,
    a ValueError, where no kernel finds them or the quantizer behind does not take ``x``.
    """
    gpu = gpu or gpu_of(x.device)
    producer = ("biased_" if bias is not None else "") + "layernorm" if centered else "rmsnorm"
    reason = unsupported(x, request._replace(producer=producer), gpu)
    most = most_columns_of_statistics(from_torch(x.dtype)) if not reason else 0
    if not reason and not x.numel():
        reason = f"x has shape {tuple(x.shape)}: nothing to normalize"
    elif not reason and x.shape[1] > most:
        reason = (
            f"x has {x.shape[1]} columns: shared memory holds rows of at most {most} of {x.dtype}"
        )
    if reason:
        raise Unsupported(reason)
    assert gpu is not None  # else it is not supported
    factors = weight.dtype, None if bias is None else bias.dtype
    run, apart = _plan(describe(x), factors, centered, gpu)
    places = Places.of(*x.shape)
    vector = x.new_empty(places.end, dtype=torch.float32)
    matrix = x if x.stride(0) == apart else x.as_strided(x.shape, (apart, 1))  # one row, any stride
    run(matrix, weight, bias, vector, eps)
    rows = x.shape[0]
    mean = vector[places.mean : places.mean + rows] if centered else None
    return RowStatistics(producer, vector, mean, vector[:rows])


@lru_cache(maxsize=4096)
def _plan(x: Described, factors: tuple[Any, Any], centered: bool, gpu: Gpu) -> tuple[Any, int]:
    """The kernel, and how far apart it takes rows to be."""
    shape, stride, dtype, address = x
    found = as_matrix(shape, stride)
    assert found is not None  # else it is not supported
    rows, columns, apart = found
    source = address, apart * dtype.itemsize
    types = from_torch(factors[0]), None if factors[1] is None else from_torch(factors[1])
    config = choose_statistics((rows, columns), source, from_torch(dtype), types, centered, gpu)
    return gpu.load(config), apart
