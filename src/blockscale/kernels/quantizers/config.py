"""What to compile for a call: a pure function of shapes, types and target, and its result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...formats import GROUP_TILE, Format, get_format
from ...layouts import get_layout
from ..common.gpu import GPUS, SHARED, Gpu
from ..common.spec import Spec, specify

__all__ = [
    "ACROSS",
    "BAND",
    "DOT",
    "PANEL",
    "PRODUCERS",
    "AmaxConfig",
    "Config",
    "Producer",
    "Request",
    "choose_config",
]

PANEL = 128  # columns of a tile that lie together in shared memory, and of a strip of eight lanes
DOT = 64  # columns of a row whose products make one partial sum
BAND = 32  # rows that a warp takes at once along columns, at most
ACROSS = 32 // (PANEL // BAND)  # lanes side by side, where a warp takes all bands of a panel
_TILE = 128 * 128  # elements that a CTA takes
_FEW_ROWS = 16
_SECTOR = 32
_SMALL = 6 << 10  # room for scales, barrier, table, and what the system takes of each block


@dataclass(frozen=True, slots=True)
class Producer:
    """Where a tile comes from: ``sources`` tiles of the same size become ``parts``, which lie
    side by side in the tensor that is quantized.

    Attributes:
        inputs: matrices that sources are of: x, which is cut where it has several, and others.
        weighted: rows have weights.
    """

    sources: int
    parts: int
    inputs: int = 1
    weighted: bool = False


PRODUCERS = {
    "load": Producer(1, 1),
    "swiglu": Producer(2, 1),  # gate, up -> their product
    "swiglu_backward": Producer(3, 2, 2),  # gate, up, gradient -> gradients of gate and up
    "weighted_swiglu": Producer(2, 1, 1, weighted=True),
    "weighted_swiglu_backward": Producer(3, 2, 2, weighted=True),
    "rmsnorm": Producer(1, 1, weighted=True),  # by what ``statistics_config.Places`` tells of
    "layernorm": Producer(1, 1, weighted=True),
    "biased_layernorm": Producer(1, 1, weighted=True),
}


class Request(NamedTuple):
    """What is asked of a quantizer.

    Attributes:
        format: its name.
        axes: (-1,), (-2,) or (-1, -2): along what there are blocks.
        layouts: of the scales, one for each of ``axes``.
        scale_rounding: None for the format's default.
        nonfinite: "propagate" or "te".
        producer: what is quantized. "load": x; "swiglu": ``reference.swiglu`` (M, H) of x (M, 2H),
            which is gate and up; "swiglu_backward": ``reference.swiglu_backward`` (M, 2H) of x and
            of another input, the gradient (M, H). "weighted_" ones take weights (M,) fp32 last;
            the backward then a matrix for partial sums of ``reference.weight_gradient``, too.
            Norms take a vector of ``statistics_config.Places``.
        grouped: the rows belong to experts.
        k_major: data along columns is stored column by column, as 4-bit data always is.
        gather: what is quantized are rows of x in another order.
        square: scales are of squares of elements, and stored for each of their rows, or columns.
        stochastic: elements are rounded by random bits.
        fours: these are numbered such that four elements that follow each other share a call of
            Philox; found by the call.
        hadamard: the size of a transform before, along each of ``axes``; 0 for none.
        draws_signs: those of the transform are drawn in the kernel.
        scaling: of ``quantization.SCALINGS``; "ms_eden" rounds scales by the bits, not elements.
    """

    format: str
    axes: tuple[int, ...] = (-1,)
    layouts: tuple[str, ...] = ("compact",)
    scale_rounding: str | None = None
    nonfinite: str = "propagate"
    producer: str = "load"
    grouped: bool = False
    k_major: bool = False
    gather: bool = False
    square: bool = False
    stochastic: bool = False
    fours: bool = True
    hadamard: int = 0
    draws_signs: bool = False
    scaling: str = "amax"

    @property
    def fmt(self) -> Format:
        return get_format(self.format)

    @property
    def turned(self) -> bool:
        """Whether data along columns lies column by column."""
        return -2 in self.axes and self.fmt.turned(-2, self.k_major)

    def is_batch(self, shape: Sequence[int]) -> bool:
        """Whether blocks must not reach from one matrix into the next, or matrices have numbers."""
        if len(shape) < 3:
            return False
        alone = -2 in self.axes or self.stochastic or self.square
        return alone or shape[-2] % self.fmt.block[0] > 0


@dataclass(frozen=True, slots=True)
class Config:
    """A kernel: all that its code depends on.

    Attributes:
        axes: (-1,), (-2,) or both of them from one read.
        layouts: of the scales, for each of ``axes``.
        grouped: rows belong to experts, whose ends lie in a tensor on the device.
        turned: data along columns lies column by column.
        tile_rows, tile_columns: of the input, a CTA each.
        loaded_rows: of them that are there at all.
        warps: of a block.
        resident: blocks on a multiprocessor at once, at most; 0 for as many as fit.
        gather: its rows are those of the source that a tensor on the device names.
        batched: there is a batch of matrices, each of which begins with a tile.
        aligned: the tile is loaded by TMA, or by cp.async, 16 bytes at a time, where rows are
            gathered; else by plain loads, an element at a time.
        column_store: bytes of a store of column-wise data: 16 or 1, of 4-bit data 16 or 8.
        scale_stores: bytes of a store of scales, for each of ``axes``.
        stochastic, fours, hadamard, draws_signs, square, scaling: of the request.
    """

    arch: str
    dtype: np.dtype
    format: str
    scale_rounding: str
    nonfinite: str
    axes: tuple[int, ...]
    layouts: tuple[str, ...]
    producer: str
    grouped: bool
    turned: bool
    tile_rows: int
    tile_columns: int
    loaded_rows: int
    warps: int
    resident: int
    gather: bool
    batched: bool
    aligned: bool
    column_store: int
    scale_stores: tuple[int, ...]
    stochastic: bool = False
    fours: bool = True
    hadamard: int = 0
    draws_signs: bool = False
    square: bool = False
    scaling: str = "amax"

    @property
    def spec(self) -> Spec:
        return specify(get_format(self.format), self.scale_rounding, self.nonfinite)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def tile_bytes(self) -> int:
        """Of one source."""
        return self.loaded_rows * self.tile_columns * self.dtype.itemsize

    @property
    def unused_shared(self) -> int:
        """Bytes of shared memory that a block claims only to keep others away."""
        if not self.resident:
            return 0
        used = self.tile_bytes * PRODUCERS[self.producer].sources + _SMALL
        return max(SHARED // self.resident - used, 0)

    @property
    def box_rows(self) -> int:
        """Rows that one instruction loads. Of a tile with an expert's last rows, few are needed."""
        return 32 if self.grouped else self.loaded_rows

    @property
    def spread(self) -> bool:
        """Whether scales along rows start on a new tile for each expert."""
        return self.grouped and -1 in self.axes and get_layout(self.layouts[0]).spreads

    @property
    def panels(self) -> int:
        return self.tile_columns // PANEL

    @property
    def band(self) -> int:
        """Rows that a warp takes at once along columns: fewer where warps are many, and lanes side
        by side must have a row's whole block."""
        format = get_format(self.format)
        wide = _is_wide(format, self.axes) and format.block[0] == 1
        return BAND // 2 if wide and self.loaded_rows // BAND < self.warps else BAND


@dataclass(frozen=True, slots=True)
class AmaxConfig(Config):
    """The kernel that finds the largest magnitude only: ``axes`` is empty.

    Attributes:
        along: -1 or -2, the axis of a transform before.
        room: the global scale leaves some above the largest scale, see ``rounding.ROOM``.
    """

    along: int = -1
    room: bool = False

    def partials(self, rows: int, columns: int) -> int:
        """Words that the CTAs write their maxima to."""
        return -(-rows // self.tile_rows) * -(-columns // self.tile_columns)


def choose_config(
    shape: tuple[int, int],
    sources: Sequence[tuple[int, int]],
    dtype: np.dtype,
    request: Request,
    gpu: Gpu = GPUS["sm_90a"],
    batch: int = 0,
) -> Config:
    """The kernel that quantizes matrices of ``shape``, or makes them of such; ``batch``: so many at
    once.

    ``sources`` has for each of the producer's inputs the address of its first element and the
    distance between its rows, both in bytes: TMA wants multiples of 16.
    """
    format, axes, layouts = request.fmt, request.axes, request.layouts
    plain = (
        request.producer == "load" and not batch and not request.grouped and format.block[0] == 1
    ) and not (request.hadamard or request.square)
    few = plain and -2 not in axes and shape[0] <= _FEW_ROWS
    rows, columns = (GROUP_TILE, PANEL) if few else _tile(shape, request, gpu.arch)
    eight, resident = _occupancy(request, gpu.arch)
    warps = (8 if eight and not few else 4) * max(1, rows * columns // _TILE)
    tiles = -(-shape[0] // rows) * -(-shape[1] // columns)
    if plain and not few and tiles <= gpu.multiprocessors:
        warps = _most_warps(format, axes, warps)  # the tiles do not fill the GPU: hide latency
    return (Config if axes else AmaxConfig)(
        arch=gpu.arch,
        dtype=dtype,
        format=format.name,
        scale_rounding=request.scale_rounding or format.default_scale_rounding,
        nonfinite=request.nonfinite,
        axes=axes,
        layouts=layouts,
        producer=request.producer,
        grouped=request.grouped,
        turned=request.turned,
        tile_rows=rows,
        tile_columns=columns,
        loaded_rows=_FEW_ROWS if few else rows,
        warps=warps,
        resident=resident,
        gather=request.gather,
        batched=batch > 0,
        aligned=all(address % 16 == 0 and apart % 16 == 0 for address, apart in sources),
        column_store=_column_store(shape, request),
        scale_stores=tuple(
            _scale_store(shape, columns, request, axis, layout)
            for axis, layout in zip(axes, layouts, strict=True)
        ),
        stochastic=request.stochastic,
        fours=request.fours,
        hadamard=request.hadamard,
        draws_signs=request.draws_signs,
        square=request.square,
        scaling=request.scaling,
    )


def _most_warps(format: Format, axes: tuple[int, ...], warps: int) -> int:
    """The most warps that a tile can take, given those that it takes where there are many."""
    if axes == (-1,):
        return 4 * warps if warps == 4 else 2 * warps
    return warps if _is_wide(format, axes) else max(warps, 8)


def _is_wide(format: Format, axes: tuple[int, ...]) -> bool:
    """Whether lanes that walk down a band side by side must have a row's whole block."""
    return len(axes) == 2 and format.block_size > PANEL // 2


def _occupancy(request: Request, arch: str) -> tuple[bool, int]:
    """Whether 128 x 128 elements take eight warps or four, and blocks on a multiprocessor at once.

    What was fastest on an H200 (docs/lab/quantize-h200.md): loads of more blocks than three get in
    the way of stores; more warps or blocks hide what else takes time: instructions (producers,
    columns of four bits), barriers (tall blocks, columns that lie K-major), finding an expert,
    lanes that share a row's blocks. Four warps take the fewest instructions. Where they would make
    more of a producer's rows than the instruction cache holds (docs/lab/experts.md), eight take
    bands of half as many; not of blocks of 128 x 128, of which one scale needs all bands.
    """
    format, axes, grouped = request.fmt, request.axes, request.grouped
    both, four_bits = len(axes) == 2, format.element.bits < 8
    if _is_wide(format, axes):
        eight = request.producer != "load" and format.block[0] == 1
    elif request.producer != "load" or arch != "sm_90a":
        eight = request.producer != "load"
    else:
        across = axes == (-1,) and format.block[0] == 1
        eight = four_bits or across or (set(request.layouts) == {"compact"} if both else grouped)
    if four_bits:
        resident = 0 if -2 in axes else 3 if request.producer == "load" else 5
    elif both and request.turned and not grouped:
        resident = 5
    elif grouped:
        resident = 5 if both else 4
    else:
        tall = format.block[0] > 1 or (-2 in axes and format.block_size > 32)
        resident = 4 if tall and not both else 3
    return eight, resident if arch == "sm_90a" else 0


def _tile(shape: tuple[int, int], request: Request, arch: str) -> tuple[int, int]:
    """Rows and columns: such that stores of scales fill whole sectors.

    Those of both axes do so by tiles of twice the size, which an H200 likes less than half sectors.
    """
    format, axes = request.fmt, request.axes
    tall = format.block[0] > 1 or request.turned or (-2 in axes and format.block_size > 32)
    tall = tall or request.square
    if set(request.layouts) != {"compact"} or -1 not in axes or tall or request.grouped:
        return 128, PANEL
    fill = _SECTOR // format.scale.nbytes * format.block_size  # columns whose scales fill a sector
    if -2 in axes and arch == "sm_90a":
        fill = min(fill, _TILE // 32)
    needed = 1 << (shape[1] - 1).bit_length()
    columns = max(PANEL, min(fill, needed, 1024))
    if PRODUCERS[request.producer].parts > 1:
        columns = math.gcd(columns, shape[1])  # a tile must not reach into the next part
    rows = _TILE // columns
    return (max(rows, 32) if -2 in axes else rows), columns


def _column_store(shape: tuple[int, int], request: Request) -> int:
    """The widest store of column-wise data, whose lines are rows, or columns where turned."""
    format = request.fmt
    if -2 not in request.axes and format.block[0] == 1:
        return 16  # there is none
    if request.turned:
        return 16 if request.grouped else math.gcd(16, format.data_shape(shape, -2)[0])
    return 16 if shape[1] % 16 == 0 else 1


def _scale_store(
    shape: tuple[int, int], tile: int, request: Request, axis: int, layout: str
) -> int:
    """The widest store that divides a line of scales, of the matrix and of ``tile`` columns."""
    format = request.fmt
    if request.grouped and axis == -1 and layout == "sm90":
        return format.scale.nbytes  # rows of an expert may begin anywhere in a line
    if layout != "compact":
        return 16
    columns = format.block[1] if axis == -1 else format.block[0]  # of a scale
    lines = [-(-n // columns) * format.scale.nbytes for n in (shape[1], tile)]
    return math.gcd(16, *lines)
