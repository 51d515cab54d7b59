# mypy: ignore-errors
"""Data along columns on its way to global memory, where it lies column by column.

16 bytes of a column are a "piece": 16 rows of it, or 32 in four bits. Pieces replace what they were
made of, each in the place of half a panel of its band, or at the start of a band of 16 rows. After
a barrier the block copies them out, all of a column side by side.
"""

from __future__ import annotations

import cutlass
from cutlass import Int64, Uint32, const_expr, cute, range_constexpr

from ..common import ptx
from .config import BAND, PANEL, Config

__all__ = ["HALF", "PIECE", "Pieces"]

HALF = PANEL // 2  # columns whose pieces lie in each other's place
PIECE = 16  # bytes
_CHUNKS = 8  # pieces that lie in all banks of shared memory once


class Pieces:
    """Columns are counted as the lanes that quantize them take them: ``apart`` side by side."""

    def __init__(self, config: Config):
        self.config = config
        self.apart = 16 if config.spec.bits == 8 else 2
        self.lanes = config.tile_columns // self.apart
        self.count = config.loaded_rows * config.spec.bits // (8 * PIECE)  # pieces of a column
        self.rows = max(1, HALF // self.apart // _CHUNKS)  # that pieces of a lane's column take
        self.pitch = self.rows * PANEL * config.dtype.itemsize  # from a lane's column to its next

    def at(self, address, lane, piece):
        """Where piece ``piece`` of a lane's first column lies, in the tile at ``address``.

        What a warp takes at once lies in different banks: pieces of a column or two, of the same
        rows of eight lanes, of 32 rows of four.
        """
        config, apart = self.config, self.apart
        if config.band < BAND:  # of 8 bits: a piece has all rows of its band
            row = lane * apart // PANEL * config.loaded_rows + piece * config.band
            row_bytes = PANEL * config.dtype.itemsize
            return address + row * row_bytes + (lane % _CHUNKS ^ piece % _CHUNKS) * PIECE
        band = piece * (config.loaded_rows // BAND) // self.count
        row = lane * apart // PANEL * config.loaded_rows + band * BAND
        row = row + lane // _CHUNKS % self.rows
        start = (row * PANEL + lane * apart // HALF % 2 * HALF) * config.dtype.itemsize
        turn = piece // 2 + piece % 2 * 4 if config.spec.bits == 8 else piece * 2
        return address + start + (lane % _CHUNKS ^ turn) * PIECE

    @cute.jit
    def copy(self, part, data, row, made: cutlass.Constexpr = True):
        """Copy all pieces of a part of the tile to ``data`` (K, bytes of M), from ``row`` on of M;
        or zeros, if they were not ``made``.
        """
        config, store = self.config, self.config.column_store
        thread = cute.arch.thread_idx()[0]
        first, piece, step = thread // self.count, thread % self.count, config.threads // self.count
        pitch = data.shape[1]
        stop = data.shape[0] if const_expr(part.stop is None) else part.stop
        for i in range_constexpr(config.tile_columns // step):
            lane, k = (first + i * step) % self.lanes, (first + i * step) // self.lanes
            words = [Uint32(0)] * (PIECE // 4)
            if const_expr(made):
                words = ptx.load_shared(self.at(part.address, lane, piece) + k * self.pitch, PIECE)
            column = part.column + lane * self.apart + k
            byte = row // (8 // config.spec.bits) + piece * PIECE
            target = data.iterator.toint() + Int64(column) * pitch + byte
            for j in range_constexpr(PIECE // store):
                if column < stop and byte + j * store < pitch:
                    some = words[j * store // 4 : (j + 1) * store // 4]
                    ptx.store_global(target + j * store, some, store)
