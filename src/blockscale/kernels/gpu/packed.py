# mypy: ignore-errors
"""Blocks along the columns of a tile in shared memory, of 4-bit elements.

Eight rows of a column make a word of codes. So a lane takes two columns, a word or two of each row,
and all rows of a block: maxima need no other lane. A warp takes half of a panel of a band of 32
rows. Data lies column by column in global memory: 16 bytes of a column, a band's, are a "piece".
Pieces replace what they were made of, and after a barrier the block copies them out, all bands of a
column side by side.
"""

from __future__ import annotations

from cutlass import Int64, const_expr, cute, range_constexpr

from . import ptx
from .columns import BAND
from .config import PANEL, Config
from .encode import Encoder
from .scales import Staging

__all__ = ["PackedColumns"]

_HALF = PANEL // 2  # columns that a warp has side by side, two in a lane
_PIECE = BAND // 2  # bytes
_CHUNKS = 8  # pieces of 16 bytes that lie in all banks of shared memory once


class PackedColumns:
    def __init__(self, config: Config, encoder: Encoder, block_size: int, place: Staging):
        self.config, self.encoder, self.place = config, encoder, place
        self.block_size = block_size
        self.bands = config.loaded_rows // BAND

    @cute.jit
    def __call__(self, part, output, rows, encode_scale, table):
        """Quantize a part of the tile, which is overwritten: ``output`` is the scales' address in
        shared memory and data (K, M/2). All threads meet in here.

        ``rows`` says which rows of the tensor they are.
        """
        config = self.config
        staged, data = output
        warp = cute.arch.thread_idx()[0] // 32
        if const_expr(-1 in config.axes):  # other warps quantize along rows what is overwritten
            cute.arch.sync_threads()
        for i in range_constexpr(self.bands * config.panels * 2 // config.warps):
            unit = i * config.warps + warp
            half, band = unit // self.bands, unit % self.bands
            where = half // 2, half % 2, band
            self.quantize(part.address, staged, where, encode_scale, table)
        cute.arch.sync_threads()
        self.copy(part, data, rows)

    @cute.jit
    def quantize(self, address, staged, where, encode_scale, table):
        """Scales and pieces of 64 columns of a band; ``where`` is panel, half and band."""
        encoder, place, size = self.encoder, self.place, self.block_size
        itemsize = self.config.dtype.itemsize
        lane = cute.arch.thread_idx()[0] % 32
        panel, half, band = where
        start = self.start(address, where) + lane * 2 * itemsize
        codes = [[], []]
        for j in range_constexpr(BAND // size):
            words = [
                ptx.load_shared(start + (j * size + row) * PANEL * itemsize, 2 * itemsize)
                for row in range(size)
            ]
            states = [encoder.states(list(column)) for column in zip(*words, strict=True)]
            amaxes = [amax for state in states for amax in encoder.amaxes(state)]
            scales = [encoder.scale(amax, encode_scale, table) for amax in amaxes]
            reciprocals = [reciprocal for _, reciprocal in scales]
            packed = encoder.elements_of_columns(words, amaxes, reciprocals)
            for k in range_constexpr(2):
                column = panel * PANEL + half * _HALF + 2 * lane + k
                target = staged + place.place(column, band * (BAND // size) + j)
                ptx.store_shared(target, [scales[k][0]], place.itemsize)
                codes[k] += packed[k]
        cute.arch.sync_warp()  # all of these columns have been read
        for k in range_constexpr(2):
            line = k * 32 + lane
            ptx.store_shared(self.piece(address, where, line), codes[k], _PIECE)

    @cute.jit
    def copy(self, part, data, rows):
        """Copy pieces to global memory."""
        config = self.config
        thread = cute.arch.thread_idx()[0]
        pitch = data.shape[1]
        stop = data.shape[0] if const_expr(part.stop is None) else part.stop
        store = config.column_store
        for i in range_constexpr(config.tile_columns * self.bands // config.threads):
            index = i * config.threads + thread
            band, line = index % self.bands, index // self.bands
            where = line // PANEL, line // _HALF % 2, band
            line = line % _HALF
            words = ptx.load_shared(self.piece(part.address, where, line), _PIECE)
            column = part.column + where[0] * PANEL + where[1] * _HALF + line % 32 * 2 + line // 32
            byte = rows.start // 2 + band * _PIECE
            target = data.iterator.toint() + Int64(column) * pitch + byte
            for j in range_constexpr(_PIECE // store):
                if column < stop and byte + j * store < pitch:
                    some = words[j * store // 4 : (j + 1) * store // 4]
                    ptx.store_global(target + j * store, some, store)

    def start(self, address, where):
        """The first element of half a panel of a band."""
        panel, half, band = where
        row = panel * self.config.loaded_rows + band * BAND
        return address + (row * PANEL + half * _HALF) * self.config.dtype.itemsize

    def piece(self, address, where, line):
        """The ``line``-th piece in the place of half a panel of a band; line 32 * i + j is column
        2 * j + i. Neither eight lines nor the pieces of a column share a bank.
        """
        row, chunk = line // _CHUNKS, line % _CHUNKS
        chunk = chunk ^ (where[2] * (_CHUNKS // self.bands))
        return self.start(address, where) + row * PANEL * self.config.dtype.itemsize + chunk * 16
