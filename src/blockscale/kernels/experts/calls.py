"""Kernels of experts on torch's tensors: from a call to a plan to a launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...dtypes import from_torch
from ..common.gpu import Gpu, Unsupported
from ..common.runtime import FLOATS, Described, describe, gpu_of, require_gpu
from .combine_config import choose_combine
from .route_config import choose_route

__all__ = ["combine", "route"]


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
    how = slots.shape[1], slots.dtype, weights is not None, dtype
    run = _plan_combine(describe(y), *how, y.device, gpu or gpu_of(y.device))
    out = torch.empty(slots.shape[0], y.shape[1], dtype=dtype, device=y.device)
    run(y, slots.contiguous(), None if weights is None else weights.contiguous(), out)
    return out


def route(experts: Tensor, num_experts: int, *, gpu: Gpu | None = None) -> list[Tensor]:
    """``reference.route``.

    Args:
        experts: int64 or int32 (tokens, top_k).
        num_experts: 1023 at most.
        gpu: as of :func:`combine`.

    Raises Unsupported, a ValueError, where there is no kernel.
    """
    device, count = experts.device, experts.numel()
    how = count, num_experts, experts.dtype.itemsize, device, gpu or gpu_of(device)
    run, chunks = _plan_route(*how)
    counts = torch.empty(chunks, num_experts + 1, dtype=torch.int32, device=device)
    found = [
        torch.empty(count, dtype=torch.int64, device=device),
        torch.empty(experts.shape, dtype=torch.int64, device=device),
        torch.empty(num_experts, dtype=torch.int32, device=device),
        torch.empty(count, dtype=torch.int32, device=device),
    ]
    run(experts.contiguous(), counts, *found)
    return found


@lru_cache(maxsize=4096)
def _plan_route(
    pairs: int, num_experts: int, index_bytes: int, device: torch.device, gpu: Gpu | None
) -> tuple[Callable[..., Any], int]:
    """The kernel, and how many chunks it counts."""
    if not pairs:
        raise Unsupported("experts: there are none to be counted")
    known = require_gpu("experts", device, gpu)
    config = choose_route(pairs, num_experts, index_bytes, known)
    return known.load(config), -(-pairs // config.chunk)


@lru_cache(maxsize=4096)
def _plan_combine(
    y: Described,
    top_k: int,
    index: torch.dtype,
    weighted: bool,
    out: torch.dtype,
    device: torch.device,
    gpu: Gpu | None,
) -> Callable[..., Any]:
    shape, stride, dtype, address = y
    known = require_gpu("y", device, gpu)
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
    config = choose_combine(shape[1], top_k, types, weighted, index.itemsize, known)
    return known.load(config)
