# mypy: ignore-errors
"""Blocks along the columns of a tile in shared memory, of 4-bit elements.

Eight rows of a column make a word of codes. So a lane takes two columns, a word or two of each row,
and all rows of a block: maxima need no other lane. A warp takes half of a panel of a band of 32
rows. A band of a column is one of the ``pieces`` that are copied out.
"""

from __future__ import annotations

from cutlass import const_expr, cute, range_constexpr

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
        config = self.config
        staged, data = output
        warp = cute.arch.thread_idx()[0] // 32
        if const_expr(-1 in config.axes):  # other warps quantize along rows what is overwritten
            cute.arch.sync_threads()
        for i in range_constexpr(self.bands * config.panels * 2 // config.warps):
            unit = i * config.warps + warp
            half, band = unit // self.bands, unit % self.bands
            self.quantize(part, staged, (half, band), rows, encode_scale, table)
        cute.arch.sync_threads()
        self.pieces.copy(part, data, rows.apart)

    @cute.jit
    def quantize(self, part, staged, where, rows, encode_scale, table):
        """Scales and pieces of 64 columns of a band; ``where`` is half a panel and the band."""
        encoder, place, size = self.encoder, self.place, self.block_size
        itemsize = self.config.dtype.itemsize
        lane = cute.arch.thread_idx()[0] % 32
        half, band = where
        row = half // 2 * self.config.loaded_rows + band * BAND
        start = part.address + (row * PANEL + half % 2 * HALF + 2 * lane) * itemsize
        column = half * HALF + 2 * lane
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
            noise = None
            if const_expr(rows.applied.noise is not None):
                top = rows.start + band * BAND + j * size
                noise = rows.applied.noise.of_pairs(top, part.column + column, size)
            packed = encoder.elements_of_columns(words, amaxes, reciprocals, noise)
            for k in range_constexpr(2):
                target = staged + place.place(column + k, band * (BAND // size) + j)
                ptx.store_shared(target, [scales[k][0]], place.itemsize)
                codes[k] += packed[k]
        cute.arch.sync_warp()  # all of these columns have been read
        target = self.pieces.at(part.address, column // 2, band)
        for k in range_constexpr(2):
            ptx.store_shared(target + k * self.pieces.pitch, codes[k], PIECE)
