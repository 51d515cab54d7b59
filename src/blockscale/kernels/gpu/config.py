"""What to compile for a call: a pure function of shapes, types and target, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...formats import Format, get_format
from ..cpu.spec import Spec, specify

__all__ = ["ARCHITECTURES", "DTYPES", "PANEL", "Config", "choose_config", "why_not"]

ARCHITECTURES = ("sm_90a", "sm_100a")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PANEL = 128  # columns of a tile that lie together in shared memory, and of a strip of eight lanes
_TILE = 128 * 128  # elements that a block of threads takes
_SECTOR = 32


@dataclass(frozen=True, slots=True)
class Config:
    """A kernel: all that its code depends on.

    Attributes:
        axes: (-1,), (-2,) or both of them from one read.
        tile_rows, tile_columns: of the input, a block of threads each.
        warps: of a block.
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
    if format.block[0] > 1:
        return f"format {format.name}: no kernel has blocks of several rows"
    if -2 in axes and (format.element.bits < 8 or format.block_size != 32):
        return f"format {format.name} along axis -2: no kernel yet"
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
        tma=(row_stride * dtype.itemsize) % 16 == 0 and address % 16 == 0,
        column_store=16 if shape[1] % 16 == 0 else 1,
        scale_stores=tuple(_scale_store(shape, format, axis, layout) for axis in axes),
    )


def _tile(
    shape: tuple[int, int], format: Format, axes: tuple[int, ...], layout: str
) -> tuple[int, int]:
    """Rows and columns: such that stores of scales fill whole sectors."""
    if layout != "compact" or -1 not in axes:
        return 128, PANEL
    fill = _SECTOR // format.scale.nbytes * format.block_size  # columns whose scales fill a sector
    needed = 1 << (shape[1] - 1).bit_length()
    columns = max(PANEL, min(fill, needed, 1024))
    rows = _TILE // columns
    return (max(rows, 32) if -2 in axes else rows), columns


def _scale_store(shape: tuple[int, int], format: Format, axis: int, layout: str) -> int:
    """The widest store that every line of scales is a multiple of."""
    if layout != "compact":
        return 16
    line = -(-shape[1] // format.block_size) if axis == -1 else shape[1]
    line *= format.scale.nbytes
    return max(n for n in (16, 8, 4, 2, 1) if line % n == 0)


