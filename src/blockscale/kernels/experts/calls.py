"""Kernels of experts on torch's tensors: from a call to a plan to a launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...dtypes import from_torch
from ..common.gpu import GPUS, Gpu, Unsupported, no_kernels
from ..common.runtime import FLOATS, Described, describe, gpu_of, missing
from .combine_config import choose_combine

__all__ = ["combine"]


def combine(
    y: Tensor,
    slots: Tensor,
    weights: Tensor | None,
    dtype: torch.dtype,
    *,
    gpu: Gpu | None = None,
) -> Tensor:
    """``reference.combine``: (tokens, H) of rows ``y`` (R, H), to the bit.

    Args:
        y: of a type of ``FLOATS``, each row at a multiple of 16 bytes.
        slots: int64 or int32 (tokens, top_k). One that names no row of ``y`` gives NaN.
        weights: fp32 (tokens, top_k), or None.
        dtype: of the result.
        gpu: to choose the kernel for where ``y`` is on a CPU, for the emulator.

    Raises Unsupported, a ValueError, where there is no kernel.
    """
    where = y.device, gpu or gpu_of(y.device)
    run = _plan(describe(y), slots.shape[1], slots.dtype, weights is not None, dtype, *where)
    out = torch.empty(slots.shape[0], y.shape[1], dtype=dtype, device=y.device)
    run(y, slots.contiguous(), None if weights is None else weights.contiguous(), out)
    return out


@lru_cache(maxsize=4096)
def _plan(
    y: Described,
    top_k: int,
    index: torch.dtype,
    weighted: bool,
    out: torch.dtype,
    device: torch.device,
    gpu: Gpu | None,
) -> Callable[..., Any]:
    shape, stride, dtype, address = y
    if missing():
        raise Unsupported(missing())
    if gpu is None:
        raise Unsupported(f"y is on {device}: the kernel runs on CUDA devices")
    if gpu.arch not in GPUS:
        raise Unsupported(f"architecture {gpu.arch}: {no_kernels(gpu.arch, GPUS)}")
    if dtype not in FLOATS or out not in FLOATS:
        raise Unsupported(f"dtypes {dtype} and {out}: kernels have {', '.join(map(str, FLOATS))}")
    if 0 in shape or not top_k:
        raise Unsupported(f"y has shape {tuple(shape)}, top_k is {top_k}: nothing to add up")
    size = dtype.itemsize
    if stride[1] != 1 or address % 16 or stride[0] * size % 16 or shape[1] * size % 16:
        raise Unsupported(
            f"y has shape {tuple(shape)} and strides {stride}: the kernel wants rows of multiples "
            "of 16 bytes that start at such"
        )
    types = from_torch(dtype), from_torch(out)
    return gpu.load(choose_combine(shape[1], top_k, types, weighted, index.itemsize, gpu))
