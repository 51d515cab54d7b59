# mypy: ignore-errors
"""Where a tile's scales wait in shared memory, and where each piece of them goes.

A tile's scales are put down in shared memory as they will lie in global memory: as "lines", each a
contiguous run there. After a barrier the block copies the lines with wide stores. A layout is thus
three functions: where scale (outer, block) of the tile lies among the lines, where a line starts in
global memory, and how many of its bytes belong there. Layouts are described in ``layouts/``.

Outer is what is not contracted: rows for axis -1, columns for axis -2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass
from cutlass import Int32, Int64, Uint32, const_expr, cute, range_constexpr, select_

from ..common import ptx

__all__ = ["Packed", "Staging", "staging"]


@dataclass(frozen=True)
class Staging:
    """Scales of a tile of ``outer`` x ``blocks``; every argument below counts scales.

    ``start`` is the tile's first (outer, block), ``shape`` the whole tensor's (outer, blocks).
    """

    outer: int
    blocks: int
    itemsize: int
    vector: int  # bytes of one store

    pad: ClassVar[int] = 1  # the layout's outer extent is a multiple of this

    @property
    def lines(self) -> int:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return self.outer * self.blocks * self.itemsize

    @property
    def line_bytes(self) -> int:
        return self.nbytes // self.lines

    def place(self, outer, block):
        """Byte offset of a scale in shared memory."""
        raise NotImplementedError

    def line(self, line, start, shape):
        """Byte offset of a line in global memory, and how many of its bytes belong there."""
        raise NotImplementedError

    @cute.jit
    def copy(self, staged, scale, start, shape, threads: cutlass.Constexpr, count=None):
        """Copy the scales from shared memory at ``staged`` to ``scale``, by all ``threads``: of
        ``count`` outer indices at most, where lines lie along them."""
        thread = cute.arch.thread_idx()[0]
        total = self.nbytes // self.vector
        for i in range_constexpr(cute.ceil_div(total, threads)):
            index = i * threads + thread
            if index < total:
                position = index * self.vector
                line, within = position // self.line_bytes, position % self.line_bytes
                offset, valid = self.line(line, start, shape)
                if const_expr(count is not None):
                    valid = cutlass.min(valid, count * self.itemsize)
                if within < valid:
                    words = ptx.load_shared(staged + position, self.vector)
                    target = scale.iterator.toint() + offset + within
                    ptx.store_global(target, words, self.vector)


class _RowMajor(Staging):
    """compact, axis -1: a line is a row's scales."""

    @property
    def lines(self) -> int:
        return self.outer

    def place(self, outer, block):
        return outer * self.line_bytes + block * self.itemsize

    def line(self, line, start, shape):
        row = start[0] + line
        offset = (Int64(row) * shape[1] + start[1]) * self.itemsize
        valid = Int32(select_(row < shape[0], (shape[1] - start[1]) * self.itemsize, Int32(0)))
        return offset, valid


class _BlockMajor(Staging):
    """compact, axis -2: a line is the scales of one row of blocks."""

    @property
    def lines(self) -> int:
        return self.blocks

    def place(self, outer, block):
        return block * self.line_bytes + outer * self.itemsize

    def line(self, line, start, shape):
        block, length = start[1] + line, (shape[0] + (self.pad - 1)) & -self.pad
        offset = (Int64(block) * length + start[0]) * self.itemsize
        valid = Int32(select_(block < shape[1], (length - start[0]) * self.itemsize, Int32(0)))
        return offset, valid


class _Sm90(_BlockMajor):
    pad = 4  # with zeros

    @cute.jit
    def clear_padding(self, scale, start, shape, is_last):
        """Set what follows the last outer index to zero, of the blocks of the tile that has it."""
        thread = cute.arch.thread_idx()[0]
        length = (shape[0] + (self.pad - 1)) & -self.pad
        outer, block = shape[0] + thread // self.blocks, start[1] + thread % self.blocks
        if is_last and outer < length and block < shape[1]:
            address = scale.iterator.toint() + (Int64(block) * length + outer) * self.itemsize
            ptx.store_global(address, [Uint32(0)], self.itemsize)


class Packed(Staging):
    """A line is four blocks of each outer index, a word each."""

    @property
    def lines(self) -> int:
        return self.blocks // 4

    def place(self, outer, block):
        return (block >> 2) * self.line_bytes + outer * 4 + (block & 3)

    def line(self, line, start, shape):
        word, length = (start[1] >> 2) + line, (shape[0] + 3) & -4
        offset = (Int64(word) * length + start[0]) * 4
        valid = Int32(select_(word < (shape[1] + 3) >> 2, (length - start[0]) * 4, Int32(0)))
        return offset, valid


class _Tcgen05(Staging):
    """A line is a tile of 128 x 4."""

    @property
    def lines(self) -> int:
        return (self.outer // 128) * (self.blocks // 4)

    def place(self, outer, block):
        tile = (outer >> 7) * (self.blocks // 4) + (block >> 2)
        return tile * 512 + (outer & 31) * 16 + ((outer >> 5) & 3) * 4 + (block & 3)

    def line(self, line, start, shape):
        across = self.blocks // 4
        row, column = (start[0] >> 7) + line // across, (start[1] >> 2) + line % across
        tiles = (shape[1] + 3) >> 2
        offset = (Int64(row) * tiles + column) * 512
        valid = Int32(select_(row < (shape[0] + 127) >> 7, Int32(512), Int32(0)))
        return offset, Int32(select_(column < tiles, valid, Int32(0)))


_KINDS = {
    ("compact", -1): _RowMajor,
    ("compact", -2): _BlockMajor,
    ("tcgen05", -1): _Tcgen05,
    ("tcgen05", -2): _Tcgen05,
    ("sm90", -1): _Sm90,
    ("sm90", -2): _Sm90,
    ("packed", -1): Packed,
    ("packed", -2): Packed,
}


def staging(layout: str, axis: int, outer: int, blocks: int, itemsize: int, vector: int) -> Staging:
    """The staging of ``layout`` for scales along ``axis``."""
    return _KINDS[layout, axis](outer, blocks, itemsize, vector)
