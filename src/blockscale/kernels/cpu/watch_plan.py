"""From a quantized matrix on a CPU, and what it was made of, to the loop that looks at them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...error_sums import SLACK
from ...memory import memory_of
from ...rounding import FP32_ONE, float32_bits
from ..common.gpu import Unsupported
from ..common.matrix import Matrix, lies_together
from ..common.watch_vector import GLOBAL_SCALE, LENGTH, nan_code
from .calls import ITEMS
from .spec import scale_values, values
from .watching import WIDTH, Shape

__all__ = ["CpuWatchPlan", "plan_watch"]

_NONE8, _NONE32 = np.empty(0, np.uint8), np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class CpuWatchPlan:
    """What is called for matrices alike, with compact scales.

    ``constants``: values of codes of elements and of scales, and what a block of scale 1 can hold.
    """

    shape: Shape
    places: np.ndarray
    constants: tuple[np.ndarray, np.ndarray, np.float32]

    def __call__(self, x: Tensor | None, parts: tuple[Tensor, Tensor, Tensor | None]) -> np.ndarray:
        """The vector of a matrix of these data, scales and global scale: see ``watching``."""
        from . import compiled

        data, scale, scalar = parts
        items = _NONE32 if x is None else memory_of(x, ITEMS[x.dtype], x.numel())
        scale8, scale32 = _NONE8, _NONE32
        if scale.dtype == torch.float32:
            scale32 = memory_of(scale, np.int32, scale.numel())
        else:
            scale8 = memory_of(scale, np.uint8, scale.numel())
        factor = FP32_ONE if scalar is None else int(float32_bits(scalar))
        found = np.zeros(LENGTH)
        found[GLOBAL_SCALE] = math.nan if scalar is None else float(scalar)
        compiled.watch_lines(
            *(items, memory_of(data, np.uint8, data.nbytes), (scale8, scale32), self.shape),
            *(self.places, self.constants, factor, (found, np.zeros(4 * WIDTH, np.int64))),
        )
        return found


def plan_watch(x: Tensor | None, matrix: Matrix, places: np.ndarray) -> CpuWatchPlan:
    """The plan of matrices that lie as this one, and were made of what lies as ``x``; ``places``:
    int32, blocks that are picked, counted along lines.

    Raises Unsupported where the loop does not look at them.
    """
    format, shape, axis = matrix.format, matrix.shape, matrix.axis
    if format.element.bits not in (4, 8) or matrix.layout != "compact":
        raise Unsupported(f"format {format.name}, layout {matrix.layout}: the loop knows neither")
    if len(shape) != 2 or 0 in shape:
        raise Unsupported(f"shape {tuple(shape)}: the loop takes matrices with elements")
    if not (lies_together(matrix.data) and matrix.scale.is_contiguous()):
        raise Unsupported("data, scale: have gaps")
    if x is not None and (x.dtype not in ITEMS or x.shape != shape or not lies_together(x)):
        raise Unsupported(f"x: {x.dtype} {tuple(x.shape)} with strides {x.stride()}")
    step = 1 if axis == -1 else -1
    (height, size), (lines, k) = format.block, shape[::step]
    x_line, x_along = (0, 0) if x is None else x.stride()[::step]
    data_line, data_along = matrix.data.stride()[::step]
    scale_line, scale_block = matrix.scale.stride()[::step]
    found = Shape(
        lines=lines,
        k=k,
        x_line=x_line,
        x_along=x_along,
        data_line=data_line,
        data_along=data_along,
        scale_line=scale_line,
        scale_block=scale_block,
        height=height,
        size=size,
        stored=format.element.stored(size),
        nan_code=nan_code(format),
        by_columns=axis == -2,
    )
    top = np.float32(format.element.max * SLACK)
    constants = values(format.element), scale_values(format.scale), top
    return CpuWatchPlan(found, places, constants)
