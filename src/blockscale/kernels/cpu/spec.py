"""Formats, shapes and strides as the integers that the compiled loops need."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...formats import FP32, Element, Format, Scale
from ...rounding import FP32_INF, decode, scale_bits

#: Rows of x up to which the loop that multiplies is faster than to dequantize and call a BLAS.
MAX_SKINNY_M = 16


class Geometry(NamedTuple):
    """Shapes and strides of one call, in elements; ``x`` is the unquantized side."""

    leads: int
    rows: int  # of x, in each lead
    columns: int
    lead_stride: int
    row_stride: int
    data_rows: int  # rows and columns of the data: those of x, or more where padded
    data_columns: int
    block_rows: int
    block_columns: int
    strips: int  # in each lead; a row of scales is one strip
    depth: int  # strips of a tile
    segments: int  # tiles of a strip
    width: int  # columns of a tile
    transposed: int  # 1: packed data along axis -2, stored (leads, columns, packed rows)

    @property
    def tiles(self) -> int:
        return self.leads * -(-self.strips // self.depth) * self.segments

    def chunk(self, elements: int) -> int:
        """Tiles that hold about so many elements."""
        rows = min(self.depth * self.block_rows, self.rows)
        return max(1, elements // max(1, rows * min(self.width, self.columns)))


def supported(format: Format) -> bool:
    """Whether the loops, which take 16 elements or 8 packed bytes at once, know such blocks."""
    rows, columns = format.block
    whole = columns % 16 == 0 and (rows == 1 or rows % 16 == 0)
    return whole and (format.element.bits == 8 or format.element.stored(columns) % 8 == 0)


@lru_cache
def values(element: Element) -> np.ndarray:
    """fp32 bits (int32) of each code of an element."""
    found: np.ndarray = decode(np.arange(1 << element.bits), element).view(np.int32)
    return found


@lru_cache
def scale_values(scale: Scale) -> np.ndarray:
    """fp32 bits (int32) of each code of a one-byte scale; empty for fp32 scales."""
    found: np.ndarray = scale_bits(np.arange(0 if scale is FP32 else 256), scale).astype(np.int32)
    return found


def least_scale(factor: int) -> int:
    """fp32 bits of a scale from which on elements times it times ``factor`` are normal numbers."""
    if factor < 1 << 23 or factor >= FP32_INF:
        return 255 << 23  # as an exponent: no scale
    # 2^-100 times an element is far from subnormal; so must be its product with the factor
    return min(127 - 100 + max(0, 127 - (factor >> 23)), 255) << 23


class Strided(NamedTuple):
    """Shape and strides, in elements, of a tensor of three dimensions; the last is contiguous."""

    shape: tuple[int, int, int]
    lead_stride: int
    row_stride: int

    @property
    def contiguous(self) -> bool:
        leads, rows, columns = self.shape
        return 0 in self.shape or (
            (rows == 1 or self.row_stride == columns)
            and (leads == 1 or self.lead_stride == rows * columns)
        )


@lru_cache(maxsize=1024)
def geometry(x: Strided, format: Format, axis: int, in_rows: bool = False) -> Geometry:
    """How the loops walk over ``x`` (leads, M, K), blocked along ``axis``.

    ``in_rows``: no tile is of two rows.
    """
    leads, rows, columns = x.shape
    height, size = format.block if axis == -1 else format.block[::-1]
    packed = format.element.bits < 8
    if not in_rows and height == 1 and columns % size == 0 and x.contiguous:
        leads, rows, columns = 1, 1, leads * rows * columns  # blocks need not know of rows
    data_rows, data_columns = rows, columns
    if axis == -1:
        data_columns = -(-columns // size) * size
    else:
        data_rows = -(-rows // height) * height
    transposed = axis == -2 and packed
    width = 2048 if height == 1 else 256 if transposed else 512
    width = max(width // size, 1) * size
    return Geometry(
        leads=leads,
        rows=rows,
        columns=columns,
        lead_stride=x.lead_stride,
        row_stride=x.row_stride,
        data_rows=data_rows,
        data_columns=data_columns,
        block_rows=height,
        block_columns=size,
        strips=-(-rows // height),
        depth=max(64 // format.element.stored(height), 1) if transposed else 1,  # whole cache lines
        segments=-(-columns // width),
        width=width,
        transposed=int(transposed),
    )
