"""What to compile for the statistics of rows that a norm divides by, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..common.gpu import GPUS, Gpu
from .config import Request
from .norm_config import SEGMENT, choose_norm, most_columns

__all__ = ["Places", "StatisticsConfig", "choose_statistics", "most_columns_of_statistics"]

_LIKE = Request("mxfp8")  # rows of RMSNorm that are quantized so take a little more shared memory


@dataclass(frozen=True, slots=True)
class Places:
    """Where fp32 numbers of a matrix (M, K) begin in the vector that the statistics are written to,
    and that norms in front of quantizers read: rstd (M,), mean (M,), weight (K,) and bias (K,).

    Each begins at a multiple of 16 bytes. Behind weight and bias there are zeros, up to a multiple
    of 16. What has no mean or no bias leaves its place as it is.
    """

    rstd: int
    mean: int
    weight: int
    bias: int
    end: int

    @classmethod
    def of(cls, rows: int, columns: int) -> Places:
        """Also of the sizes that a kernel knows when it runs."""
        m, k = (rows + 3) // 4 * 4, (columns + 15) // 16 * 16
        return cls(0, m, 2 * m, 2 * m + k, 2 * m + 2 * k)


@dataclass(frozen=True, slots=True)
class StatisticsConfig:
    """A kernel: all that its code depends on.

    Attributes:
        bias_dtype: None where a norm has no bias.
        centered: rows lose their mean first.

    The others are those of :class:`NormConfig`.
    """

    arch: str
    dtype: np.dtype
    weight_dtype: np.dtype
    bias_dtype: np.dtype | None
    centered: bool
    columns: int
    tile_rows: int
    segment_warps: int
    row_warps: int
    bulk: bool

    @property
    def threads(self) -> int:
        return 32 * self.segment_warps * self.row_warps

    @property
    def segments(self) -> int:
        return -(-self.columns // SEGMENT)

    @property
    def layout(self) -> str:
        """Rows are taken in their order, as for this layout of scales."""
        return "compact"


def choose_statistics(
    shape: tuple[int, int],
    source: tuple[int, int],
    dtype: np.dtype,
    factors: tuple[np.dtype, np.dtype | None],
    centered: bool,
    gpu: Gpu = GPUS["sm_90a"],
) -> StatisticsConfig:
    """The kernel for a matrix of ``shape``; ``factors``: the types of weight and bias.

    ``source``: address of its first element and distance between its rows, both in bytes.
    """
    like = choose_norm(shape, source, dtype, (0, factors[0]), _LIKE, gpu)
    return StatisticsConfig(
        arch=gpu.arch,
        dtype=dtype,
        weight_dtype=factors[0],
        bias_dtype=factors[1],
        centered=centered,
        columns=shape[1],
        tile_rows=like.tile_rows,
        segment_warps=like.segment_warps,
        row_warps=like.row_warps,
        bulk=like.bulk,
    )


def most_columns_of_statistics(dtype: np.dtype) -> int:
    """Of a row that shared memory holds."""
    return most_columns(dtype, _LIKE.fmt)
