"""What to compile for a call: a pure function of shapes, types and target, and its result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...formats import Format, get_format
from ...layouts import get_layout
from ..cpu.spec import Spec, specify

__all__ = ["ARCHITECTURES", "DTYPES", "PANEL", "Config", "choose_config", "why_not"]

ARCHITECTURES = ("sm_90a", "sm_100a")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PANEL = 128  # columns of a tile that lie together in shared memory, and of a strip of eight lanes
_TILE = 128 * 128  # elements that a block of threads takes
_SECTOR = 32
_SHARED = 227 << 10  # of a multiprocessor
_SMALL = 6 << 10  # room for scales, barrier, table, and what the system takes of each block


@dataclass(frozen=True, slots=True)
class Config:
    """A kernel: all that its code depends on.

    Attributes:
        axes: (-1,), (-2,) or both of them from one read.
        tile_rows, tile_columns: of the input, a block of threads each.
        warps: of a block.
        resident: blocks on a multiprocessor at once, at most; 0 for as many as fit.
        tma: the tile is loaded by TMA; else by plain loads, an element at a time.
        column_store: bytes of a store of column-wise data, 16 or 1.
        scale_stores: bytes of a store of scales, for each of ``axes``.
    """

    arch: str
    dtype: torch.dtype
    format: str
    scale_rounding: str
    nonfinite: str
    layout: str
    axes: tuple[int, ...]
    tile_rows: int
    tile_columns: int
    warps: int
    resident: int
    tma: bool
    column_store: int
    scale_stores: tuple[int, ...]

    @property
    def spec(self) -> Spec:
        return specify(get_format(self.format), self.scale_rounding, self.nonfinite)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def unused_shared(self) -> int:
        """Bytes of shared memory that a block claims only to keep others away."""
        if not self.resident:
            return 0
        tile = self.tile_rows * self.tile_columns * self.dtype.itemsize
        return max(_SHARED // self.resident - tile - _SMALL, 0)

    @property
    def panels(self) -> int:
        return self.tile_columns // PANEL


def why_not(format: Format, axes: Sequence[int], layout: str, arch: str, dtype: torch.dtype) -> str:
    """Why there is no kernel for such a call; empty where there is one."""
    if arch not in ARCHITECTURES:
        return f"architecture {arch}: there are kernels for {' and '.join(ARCHITECTURES)}"
    if dtype not in DTYPES:
        return f"dtype {dtype}: there are kernels for {', '.join(map(str, DTYPES))}"
    if format.element.bits == 6:
        return f"format {format.name}: no kernel packs 6-bit elements"
    if format.scale.nbytes not in get_layout(layout).itemsize:
        return f"layout {layout}: does not hold scales of {format.name}"
    if format.block[0] > 1 and layout != "compact":
        return f"format {format.name}: its kernels write compact scales"
    if -2 in axes and format.element.bits < 8:
        return f"format {format.name} along axis -2: no kernel packs along columns"
    return ""


def choose_config(
    shape: tuple[int, int],
    row_stride: int,
    dtype: torch.dtype,
    format: Format,
    *,
    axes: tuple[int, ...] = (-1,),
    layout: str = "compact",
    scale_rounding: str | None = None,
    nonfinite: str = "propagate",
    arch: str = "sm_90a",
    address: int = 0,
) -> Config:
    """The kernel for a matrix of ``shape`` whose rows lie ``row_stride`` elements apart.

    ``address`` is that of the first element: TMA wants it and the distance between rows to be
    multiples of 16 bytes.
    """
    rows, columns = _tile(shape, format, axes, layout)
    return Config(
        arch=arch,
        dtype=dtype,
        format=format.name,
        scale_rounding=scale_rounding or format.default_scale_rounding,
        nonfinite=nonfinite,
        layout=layout,
        axes=axes,
        tile_rows=rows,
        tile_columns=columns,
        warps=max(4, rows * columns // _TILE * 4),
        # Measured on an H200: loads of more blocks than three only get in the way of stores. Where
        # elements take more instructions, four bits, more blocks hide them.
        resident=3 if arch == "sm_90a" and format.element.bits == 8 else 0,
        tma=(row_stride * dtype.itemsize) % 16 == 0 and address % 16 == 0,
        column_store=16 if shape[1] % 16 == 0 else 1,
        scale_stores=tuple(_scale_store(shape, columns, format, axis, layout) for axis in axes),
    )


def _tile(
    shape: tuple[int, int], format: Format, axes: tuple[int, ...], layout: str
) -> tuple[int, int]:
    """Rows and columns: such that stores of scales fill whole sectors."""
    tall = format.block[0] > 1 or (-2 in axes and format.block_size > 32)
    if layout != "compact" or -1 not in axes or tall:
        return 128, PANEL
    fill = _SECTOR // format.scale.nbytes * format.block_size  # columns whose scales fill a sector
    needed = 1 << (shape[1] - 1).bit_length()
    columns = max(PANEL, min(fill, needed, 1024))
    rows = _TILE // columns
    return (max(rows, 32) if -2 in axes else rows), columns


def _scale_store(shape: tuple[int, int], tile: int, format: Format, axis: int, layout: str) -> int:
    """The widest store that divides a line of scales, of the matrix and of ``tile`` columns."""
    if layout != "compact":
        return 16
    columns = format.block[1] if axis == -1 else format.block[0]  # of a scale
    lines = [-(-n // columns) * format.scale.nbytes for n in (shape[1], tile)]
    return math.gcd(16, *lines)
