"""What to compile for RMSNorm and quantization of its rows: a pure function, and its result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...formats import Format, get_format
from ...layouts import get_layout
from ..common.gpu import GPUS, SHARED, Gpu
from ..common.spec import Spec, specify
from .config import Request

__all__ = ["SEGMENT", "NormConfig", "choose_norm", "most_columns"]

SEGMENT = 512  # columns of a warp at a time
_RESERVED = 1 << 10  # that the system takes of each block
_RESIDENT = 3  # blocks on a multiprocessor at once: one waits for loads while others compute
_WARPS = 32  # of them all, so that a thread has 64 registers
_FEW_WARPS = 8  # of a block, at least, where it has work for them
_MAX_ROWS = 32


@dataclass(frozen=True, slots=True)
class NormConfig:
    """A kernel: all that its code depends on.

    Attributes:
        columns: of the input.
        tile_rows: rows of a CTA, a power of two.
        segment_warps: warps side by side along a row, each taking every so many-th segment.
        row_warps: warps that share the rows of a tile.
        bulk: a row is loaded by one bulk copy; else by plain loads, an element at a time.
        wide_weight: 16 weights are loaded by 16-byte loads; else one at a time.
    """

    arch: str
    dtype: np.dtype
    weight_dtype: np.dtype
    format: str
    scale_rounding: str
    nonfinite: str
    layout: str
    columns: int
    tile_rows: int
    segment_warps: int
    row_warps: int
    bulk: bool
    wide_weight: bool

    @property
    def spec(self) -> Spec:
        return specify(get_format(self.format), self.scale_rounding, self.nonfinite)

    @property
    def threads(self) -> int:
        return 32 * self.segment_warps * self.row_warps

    @property
    def segments(self) -> int:
        return -(-self.columns // SEGMENT)

    @property
    def spread(self) -> bool:
        """Whether rows past the last one, copies of it, have scales, which are zero."""
        return self.layout != "compact"

    @property
    def scaling(self) -> str:
        """As of ``Config``: no other is asked of a norm's rows."""
        return "amax"

    @property
    def row_multiple(self) -> int:
        """The layout has scales of a multiple of so many rows."""
        return get_layout(self.layout).pad[0]


def choose_norm(
    shape: tuple[int, int],
    source: tuple[int, int],
    dtype: np.dtype,
    weight: tuple[int, np.dtype],
    request: Request,
    gpu: Gpu = GPUS["sm_90a"],
) -> NormConfig:
    """The kernel for a matrix of ``shape``, K of which shared memory holds a row.

    ``source``: address of its first element and distance between its rows, both in bytes.
    ``weight``: address of the first weight, and their dtype.
    """
    (m, k), format = shape, request.fmt
    segments, processors = -(-k // SEGMENT), gpu.multiprocessors
    row, small = segments * _segment_bytes(dtype, format) + 4, _small(format) + _RESERVED
    whole = SHARED + _RESERVED
    fit = min(max((whole // _RESIDENT - small) // row, 1), _MAX_ROWS)
    spread = max(m // processors, 1)  # leave no multiprocessor idle
    rows = 1 << min(fit, spread).bit_length() - 1
    resident = min(_RESIDENT, whole // (rows * row + small), -(-m // (rows * processors)))
    segment_warps = -(-segments // -(-segments // (_WARPS // resident)))
    return NormConfig(
        arch=gpu.arch,
        dtype=dtype,
        weight_dtype=weight[1],
        format=format.name,
        scale_rounding=request.scale_rounding or format.default_scale_rounding,
        nonfinite=request.nonfinite,
        layout=request.layouts[0],
        columns=k,
        tile_rows=rows,
        segment_warps=segment_warps,
        row_warps=min(rows, 1 << max(_FEW_WARPS // segment_warps, 1).bit_length() - 1),
        bulk=all(n % 16 == 0 for n in (*source, k * dtype.itemsize)),
        wide_weight=weight[0] % 16 == 0 and k % 16 == 0,
    )


def _segment_bytes(dtype: np.dtype, format: Format) -> int:
    """Shared memory of a row's segment: elements, scales, and the sum of squares."""
    scales = SEGMENT // format.block_size * format.scale.nbytes
    return SEGMENT * dtype.itemsize + scales + 4


def _small(format: Format) -> int:
    """Shared memory of a block beside its rows: the barrier, a table, and gaps to align them."""
    return 256 + (512 if format.has_global_scale else 0)


def most_columns(dtype: np.dtype, format: Format) -> int:
    """Of a row that shared memory holds."""
    return (SHARED - _small(format) - 4) // _segment_bytes(dtype, format) * SEGMENT
