"""Products of quantized matrices as bfloat16, where that is exact, by the processor's instruction.

AVX512_BF16 multiplies pairs of bfloat16 and adds them to fp32, several times as fast as fp32 is
multiplied. Results do not depend on the number of threads, nor on rows and columns beside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numba.core.registry import cpu_target
from torch import Tensor

from ...formats import FP32, Format
from ...memory import memory_of
from ...threads import run
from ..common.spec import specify
from . import compiled, pairing, tiling
from .intrinsics import ROWS, TILE
from .spec import Strided, geometry, scale_values, values

__all__ = ["Pairs", "available", "is_exact", "multiply", "pair"]

_CHUNK = 1 << 18  # elements that are worth a thread of their own
_PRODUCTS = 1 << 24  # and products
_LEAST = (127 - 100) << 23  # a scale below which products with elements may be subnormal
_NONE = np.empty(0, np.int32)
_A_ROWS = 96  # of a panel of A whose pairs are interleaved; several tiles


T = TypeVar("T")


class Pairs(NamedTuple):
    """A matrix (rows, K) in memory as ``pairing`` says, padded to whole panels."""

    memory: Tensor
    panels: tuple[int, int, int, int]
    rows: int
    k: int


@lru_cache
def available() -> bool:
    """Whether this processor has the instruction, as numba sees it."""
    return "+avx512bf16" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")


def is_exact(format: Format) -> bool:
    """Whether bfloat16 holds elements times their block's scale; global scales come after sums."""
    return format.scale is not FP32


def pair(data: Tensor, scale: Tensor, format: Format, k: int, left: bool) -> Pairs | None:
    """Pairs along the contraction of data (rows, K), of any strides, and scales (rows, blocks).

    ``left``: for the first operand of :func:`multiply`. None where one number is subnormal as
    bfloat16: the instruction would take it for zero.
    """
    if format.element.bits == 8 and data.stride(0) == 1 and data.mT.is_contiguous():
        return _pair_columns(data.mT, scale.mT.contiguous(), format, k, left)
    found = _pair_rows(data.contiguous(), scale.contiguous(), format, k)
    return found if left or found is None else _interleaved(found)


def _pair_rows(data: Tensor, scale: Tensor, format: Format, k: int) -> Pairs | None:
    """Of lines that are the contraction, each after the other."""
    rows, pairs = data.shape[0], -(-k // 2)
    out = torch.empty(-(-rows // ROWS) * ROWS * pairs, dtype=torch.int32)
    grid = geometry(Strided((1, rows, k), rows * k, k), format, -1)
    parts, constants = _parts(data, scale), _constants(format)
    memory = memory_of(out, np.uint16, 2 * out.numel())

    def work(first: int, last: int) -> bool:
        scratch = pairing.make_scratch()
        return compiled.pair_row_tiles(*parts, memory, grid, *constants, scratch, first, last)

    if any(_run(work, grid.tiles, grid.chunk(_CHUNK))):
        return None
    return Pairs(out, pairing.Panels(ROWS, ROWS * pairs, pairs, 1), rows, k)


def _interleaved(given: Pairs) -> Pairs:
    """The same, in panels of a tile's columns."""
    panels, rows, pairs = -(-given.rows // TILE), given.rows, given.panels[2]
    out = torch.empty(panels * TILE * pairs, dtype=torch.int32)
    memory = [memory_of(x, np.int32, x.numel()) for x in (given.memory, out)]

    def work(first: int, last: int) -> None:
        compiled.interleave_rows(*memory, rows, pairs, TILE, first, last)

    _run(work, panels, max(1, _CHUNK // max(1, TILE * given.k)))
    return Pairs(out, pairing.Panels(TILE, TILE * pairs, 1, TILE), rows, given.k)


def _pair_columns(data: Tensor, scale: Tensor, format: Format, k: int, left: bool) -> Pairs | None:
    """Of columns that are the contraction, in panels."""
    rows, pairs, width = data.shape[1], -(-k // 2), _A_ROWS if left else TILE
    panels = pairing.Panels(width, width * pairs, 1, width)
    out = torch.empty(-(-rows // width) * panels.size, dtype=torch.int32)
    grid = geometry(Strided((1, k, rows), k * rows, rows), format, -2)
    parts, constants = _parts(data, scale), _constants(format)
    memory = memory_of(out, np.int32, out.numel())

    def work(first: int, last: int) -> bool:
        scratch = pairing.make_scratch(grid.width * grid.block_rows // 2)
        return compiled.pair_column_tiles(
            *parts, memory, grid, *constants, panels, scratch, first, last
        )

    unfit = _run(work, grid.tiles, grid.chunk(_CHUNK))
    return None if any(unfit) else Pairs(out, panels, rows, k)


def _parts(data: Tensor, scale: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As the loops take them, which know scales of fp32, too."""
    return memory_of(data, np.uint8, data.nbytes), memory_of(scale, np.uint8, scale.numel()), _NONE


@lru_cache
def _constants(format: Format) -> tuple[object, ...]:
    spec = specify(format, format.default_scale_rounding, "te")
    return spec, values(format.element), scale_values(format.scale), _LEAST


def _run(work: Callable[[int, int], T], items: int, chunk: int) -> list[T]:
    return run(work, items, chunk, torch.get_num_threads())


def multiply(
    a: Pairs,
    b: Pairs,
    a_global: Tensor | None,
    b_global: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """``a @ b.mT`` times both global scales, rounded once to ``dtype``, fp32 or bfloat16."""
    out = torch.empty(a.rows, b.rows, dtype=dtype)
    items = np.int32 if dtype == torch.float32 else np.uint16
    scalars = (np.float32(1 if x is None else x.item()) for x in (a_global, b_global))
    fixed = (
        memory_of(a.memory, np.int32, a.memory.numel()),
        memory_of(b.memory, np.int32, b.memory.numel()),
        memory_of(out, items, out.numel()),
        *(a.rows, b.rows, -(-a.k // 2)),
        a.panels,
        *scalars,
    )

    def work(first: int, last: int) -> None:
        compiled.multiply_tiles(*fixed, tiling.make_scratch(), first, last)

    each = max(1, a.rows * TILE * a.k)
    _run(work, -(-b.rows // TILE), max(1, _PRODUCTS // each))
    return out
