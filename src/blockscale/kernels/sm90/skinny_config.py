"""What to compile for a product of a handful of bf16 rows, and for which products there is one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...formats import Format, get_format
from ..common.epilogue import Epilogue
from ..common.gpu import GPUS, SHARED, Gpu
from ..common.loadable import rows_to_load
from ..common.refuse import refuse
from .mixed_config import BLOCK_K, gain

__all__ = ["MAX_SKINNY_M", "SCALE_ROW", "Config", "choose_config", "fills_gpu"]

SCALE_ROW = 16  # bytes of block scales of a row, which TMA loads at least
_A_ROWS = (8, 16)  # of a tile
MAX_SKINNY_M = _A_ROWS[-1]
_B_ROWS = (32, 64)
_MOST_WARPS, _WARPS, _FEW_WARPS = 16, 8, 4
_NARROW_AT_ONCE = 6  # CTAs of few warps, rows of A and bits that fit a multiprocessor
_SHARED = 228 << 10  # of a multiprocessor; a block takes 1 KiB more than it asks for


@dataclass(frozen=True, slots=True)
class Config:
    """A kernel: all that its code depends on.

    Attributes:
        b_format: its name.
        rows: of A, at most.
        loaded_rows: of them; 0 for all. Fewer where there are no more.
        b_rows: of B, that a CTA takes.
        warps: that take stages along K in turn.
        stages: of each warp, in flight.
        tma_scales: TMA brings block scales of B with a stage, which their rows have to be aligned
            for; else threads read their own.
        resident: CTAs on a multiprocessor at once, at most; 0 for as many as fit. With room for
            more, those of the next kernel, which come early, would not be spread evenly.
        accumulate: add to the output.
        bias: the type of a vector that is added to each row, if there is one.
        alpha: as of ``common.epilogue.Epilogue``.
    """

    b_format: str
    out_dtype: np.dtype
    rows: int = 8
    loaded_rows: int = 0
    b_rows: int = _B_ROWS[0]
    warps: int = 8
    stages: int = 2
    tma_scales: bool = True
    resident: int = 0
    accumulate: bool = False
    bias: np.dtype | None = None
    alpha: tuple[int, ...] = ()
    arch: str = "sm_90a"

    def __post_init__(self) -> None:
        wrong = {
            "rows": self.rows not in _A_ROWS,
            "b_rows": self.b_rows not in _B_ROWS,
            "stages": self.stages < 1 or self.shared_bytes > SHARED,
            "warps": self.warps < 1,
            "loaded_rows": self.loaded_rows not in range(self.rows),
        }
        refuse(self, wrong)

    @property
    def format(self) -> Format:
        return get_format(self.b_format)

    @property
    def row_bytes(self) -> int:
        """Of B in a stage."""
        return BLOCK_K * self.format.element.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Of a row of B in a stage."""
        return BLOCK_K // self.format.block_size

    @property
    def mma_tiles(self) -> tuple[int, int]:
        """Of a CTA's tile: of 16 rows of B, and of 8 rows of A."""
        return self.b_rows // 16, self.rows // 8

    @property
    def slots(self) -> int:
        """Stages of all warps."""
        return self.warps * self.stages

    @property
    def slot_bytes(self) -> int:
        """With a barrier."""
        scales = SCALE_ROW if self.tma_scales else 0
        return self.b_rows * (self.row_bytes + scales) + self.rows * 2 * BLOCK_K + 8

    @property
    def unused_shared(self) -> int:
        """Bytes of shared memory that a block claims only to keep others away."""
        if not self.resident:
            return 0
        return max(_SHARED // (self.resident + 1) - self.slots * self.slot_bytes, 0)

    @property
    def shared_bytes(self) -> int:
        """At most."""
        return self.slots * self.slot_bytes + self.unused_shared + 1024

    @property
    def gain(self) -> float:
        """What the accumulators lack."""
        return gain(self.format)


def fills_gpu(n: int, multiprocessors: int) -> bool:
    """Whether CTAs that have all of K, for ``n`` rows of B, are as many as half of the
    multiprocessors, or more: else it pays to split K, unless A would have to be put in order."""
    return 2 * -(-n // _B_ROWS[0]) > multiprocessors


def _rows_of_b(n: int, rows: int, format: Format, multiprocessors: int) -> int:
    """As measured, with NVFP4 alone: 16 rows of A are as many bytes as 64 of B that have four bits,
    so that tiles of 64 pay if multiprocessors have one at most, and 0.6 of them do."""
    few, many = _B_ROWS
    suits_many = format.name == "nvfp4" and rows == 16
    one_each = 0.6 * multiprocessors < -(-n // many) <= multiprocessors
    return many if suits_many and one_each else few


def _warps(tiles: int, k_blocks: int, rows: int, bits: int, multiprocessors: int) -> int:
    """As measured (benchmarks/results/archive/skinny_warps_h200.json): most where multiprocessors
    have one tile at most and each warp more than two K blocks, of few rows of A, unless so many
    tiles of eight bits keep memory busy; few where many tiles fit a multiprocessor at once."""
    few_rows, narrow = rows == _A_ROWS[0], bits == 4
    if tiles <= multiprocessors:
        long = k_blocks > 2 * _MOST_WARPS
        pays = few_rows and long and (narrow or tiles <= 0.75 * multiprocessors)
        return _MOST_WARPS if pays else _WARPS
    if tiles <= 2 * multiprocessors:
        return _WARPS if narrow else 6
    in_turns = tiles > _NARROW_AT_ONCE * multiprocessors
    return _WARPS if few_rows and narrow and in_turns else _FEW_WARPS


def choose_config(
    m: int,
    n: int,
    k: int,
    b_format: str,
    epilogue: Epilogue,
    *,
    tma_scales: bool = True,
    gpu: Gpu = GPUS["sm_90a"],
) -> Config:
    """The kernel for a product of ``m`` rows of ``k`` elements by a matrix of ``n`` such rows.
    ``tma_scales``: whether TMA can load its block scales."""
    rows, format = next(each for each in _A_ROWS if each >= m), get_format(b_format)
    b_rows = _rows_of_b(n, rows, format, gpu.multiprocessors)
    tiles, k_blocks = -(-n // b_rows), -(-k // BLOCK_K)
    resident = -(-tiles // gpu.multiprocessors)
    return Config(
        b_format,
        epilogue.out_dtype,
        rows=rows,
        loaded_rows=rows_to_load(m, rows),
        b_rows=b_rows,
        warps=_warps(tiles, k_blocks, rows, format.element.bits, gpu.multiprocessors),
        tma_scales=tma_scales,
        resident=resident if resident < 4 else 0,
        accumulate=epilogue.accumulate,
        bias=epilogue.bias,
        alpha=epilogue.alpha,
    )
