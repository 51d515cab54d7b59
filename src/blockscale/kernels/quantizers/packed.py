# mypy: ignore-errors
"""Blocks along the columns of a tile in shared memory, of 4-bit elements.

Eight rows of a column make a word of codes. So a lane takes two columns, a word or two of each row,
and all rows of a block: maxima need no other lane. A warp takes half of a panel of a band of 32
rows. A band of a column is one of the ``pieces`` that are copied out.
"""

from __future__ import annotations

from cutlass import Uint32, const_expr, cute, range_constexpr, select_

from ..common import ptx
from ..common.encode import Encoder
from .config import BAND, PANEL, Config
from .pieces import HALF, PIECE, Pieces
from .scales import Staging

__all__ = ["PackedColumns"]


class PackedColumns:
    def __init__(
        self, config: Config, encoder: Encoder, block_size: int, place: Staging, pieces: Pieces
    ):
        self.config, self.encoder, self.place, self.pieces = config, encoder, place, pieces
        self.block_size = block_size
        self.bands = config.loaded_rows // BAND

    @cute.jit
    def __call__(self, part, output, rows, encode_scale, table):
        """Quantize a part of the tile, which is overwritten: ``output`` is the scales' address in
        shared memory and data (K, M/2). All threads meet in here.

        ``rows`` says which rows of the tensor they are.
        """
        config, data = self.config, output[1]
        warp = cute.arch.thread_idx()[0] // 32
        if const_expr(-1 in config.axes):  # other warps quantize along rows what is overwritten
            cute.arch.sync_threads()
        for i in range_constexpr(self.bands * config.panels * 2 // config.warps):
            unit = i * config.warps + warp
            half, band = unit // self.bands, unit % self.bands
            self.quantize(part, output, (half, band), rows, encode_scale, table)
        cute.arch.sync_threads()
        self.pieces.copy(part, data, rows.apart)

    @cute.jit
    def quantize(self, part, output, where, rows, encode_scale, table):
        """Scales and pieces of 64 columns of a band; ``where`` is half a panel and the band."""
        encoder, place, size = self.encoder, self.place, self.block_size
        itemsize = self.config.dtype.itemsize
        lane = cute.arch.thread_idx()[0] % 32
        (half, band), (staged, data) = where, output
        squares = rows.applied.squares
        row = half // 2 * self.config.loaded_rows + band * BAND
        start = part.address + (row * PANEL + half % 2 * HALF + 2 * lane) * itemsize
        column = half * HALF + 2 * lane
        codes = [[], []]
        held = []
        for j in range_constexpr(BAND // size):
            if const_expr(len(held) == 0):  # rows that are transformed together
                top = start + j * size * PANEL * itemsize
                held = self.load(top, max(size, self.config.hadamard), rows.applied.transform)
            words, held = held[:size], held[size:]
            if const_expr(squares is not None):
                amax = squares.amax(band * BAND + j * size, column)
                amaxes = [amax] * 2
                scales = [encoder.scale(amax, encode_scale, table)] * 2
            else:
                states = [encoder.states(list(column)) for column in zip(*words, strict=True)]
                amaxes = [amax for state in states for amax in encoder.amaxes(state)]
                scales = [encoder.scale(amax, encode_scale, table) for amax in amaxes]
            reciprocals = [reciprocal for _, reciprocal in scales]
            noise = None
            if const_expr(rows.applied.noise is not None):
                top = rows.start + band * BAND + j * size
                noise = rows.applied.noise.of_pairs(top, part.column + column, size)
            packed = encoder.elements_of_columns(words, amaxes, reciprocals, noise)
            for k in range_constexpr(2):
                target = staged + place.place(column + k, band * (BAND // size) + j)
                code = scales[k][0]
                if const_expr(squares is not None):  # padding is zero
                    code = select_(part.column + column + k < data.shape[0], code, Uint32(0))
                ptx.store_shared(target, [code], place.itemsize)
                codes[k] += packed[k]
        cute.arch.sync_warp()  # all of these columns have been read
        target = self.pieces.at(part.address, column // 2, band)
        for k in range_constexpr(2):
            ptx.store_shared(target + k * self.pieces.pitch, codes[k], PIECE)

    def load(self, start, count: int, transform) -> list:
        """Words of two columns of each of ``count`` rows, transformed if they are to be."""
        itemsize = self.config.dtype.itemsize
        rows = [
            ptx.load_shared(start + row * PANEL * itemsize, 2 * itemsize) for row in range(count)
        ]
        return rows if transform is None else transform.of_columns(rows)
