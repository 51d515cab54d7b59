"""From a quantized matrix, and what it was made of, to what is launched."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...dtypes import from_torch
from ..common.gpu import Gpu, Unsupported
from ..common.matrix import Matrix, lies_together
from ..common.runtime import FLOATS, describe, require_gpu
from .config import WatchConfig, ctas_of

__all__ = ["WatchPlan", "plan_watch"]

_MOST = 1 << 31  # what 32 bits count


@dataclass(frozen=True, slots=True)
class WatchPlan:
    """What is launched for matrices alike; ``places``: so many blocks that are picked."""

    run: Callable[..., Any]
    sizes: tuple[int, int, int]  # lines, elements of a line, CTAs
    places: Tensor
    picks: int

    def __call__(
        self, x: Tensor | None, parts: tuple[Tensor, Tensor, Tensor | None], row: tuple[Tensor, int]
    ) -> None:
        """Write one of the rows of a tensor, int32 (any, ``row_words(picks)``), zeros before, of
        data and scales as bytes, and the global scale."""
        self.run(x, *parts, self.places, row, self.sizes)


def plan_watch(
    x: Tensor | None, matrix: Matrix, places: Tensor, device: torch.device, gpu: Gpu | None
) -> WatchPlan:
    """The plan of matrices that lie as this one, whose parts may be on meta, and were made of what
    lies as ``x``; ``places``: int32 (n,), blocks that are picked, counted along lines.

    Raises Unsupported where no kernel looks at them.
    """
    gpu = require_gpu("data", device, gpu)
    format, shape, axis = matrix.format, matrix.shape, matrix.axis
    if format.element.bits == 6:
        raise Unsupported(f"format {format.name}: no kernel quantizes to 6 bits")
    if len(shape) != 2 or 0 in shape:
        raise Unsupported(f"shape {tuple(shape)}: the kernel takes matrices with elements")
    lines, k = shape if axis == -1 else shape[::-1]
    if math.prod(shape) >= _MOST * 4:
        raise Unsupported(f"shape {tuple(shape)}: the kernel counts vectors to 2^31")
    if x is not None:
        _check_source(x, shape)
    nbytes = 0 if x is None else x.numel() * x.element_size()
    config = WatchConfig(
        arch=gpu.arch,
        format=format.name,
        dtype=None if x is None else from_torch(x.dtype),
        layout=matrix.layout,
        axis=axis,
        turned=matrix.turned,
        has_global_scale=matrix.global_scale is not None,
    )
    if not matrix.scale.is_contiguous() or matrix.scale.storage_offset() % 4:
        raise Unsupported("scale: does not lie as a kernel writes it")
    scales = matrix.scale.nbytes // format.scale.nbytes
    sizes = lines, k, ctas_of(scales, nbytes, gpu.multiprocessors)
    return WatchPlan(gpu.load(config), sizes, places, len(places))


def _check_source(x: Tensor, shape: tuple[int, int]) -> None:
    if x.dtype not in FLOATS or tuple(x.shape) != tuple(shape):
        raise Unsupported(f"x: {tuple(x.shape)} {x.dtype} is not what {tuple(shape)} was made of")
    if not lies_together(x):
        raise Unsupported(f"x: has strides {x.stride()}; its elements must lie together")
    if describe(x)[3] % 16:
        raise Unsupported("x: does not begin at a multiple of 16 bytes")
