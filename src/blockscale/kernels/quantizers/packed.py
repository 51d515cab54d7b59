# mypy: ignore-errors
"""Blocks along the columns of a tile in shared memory, of 4-bit elements.

Eight rows of a column make a word of codes. So a lane takes two columns, a word or two of each row,
and all rows of a block: maxima need no other lane. A warp takes half of a panel of a band of 32
rows; of blocks of more rows that are transformed 16 columns of all bands, so that what lanes
exchange stays in the warp. A band of a column is one of the ``pieces`` that are copied out.
"""

from __future__ import annotations

from cutlass import Uint32, const_expr, cute, range_constexpr, select_

from ..common import ptx
from ..common.encode import Encoder
from ..common.four_over_six import better_scale
from ..common.ms_eden import corrected_scales
from .config import ACROSS, BAND, PANEL, Config
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
        self.tall = config.hadamard > BAND

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
        lane, held = cute.arch.thread_idx()[0] % 32, []
        for i in range_constexpr(self.bands * config.panels * 2 // config.warps):
            unit = i * config.warps + warp
            if const_expr(self.tall):
                column, band = (unit * ACROSS + lane % ACROSS) * 2, lane // ACROSS
                start = part.address + (band * BAND * PANEL + column) * config.dtype.itemsize
            else:
                half, band = unit // self.bands, unit % self.bands
                row = half // 2 * config.loaded_rows + band * BAND
                start = row * PANEL + half % 2 * HALF + 2 * lane
                start = part.address + start * config.dtype.itemsize
                column = half * HALF + 2 * lane
            where = start, band, column
            codes = self.quantize(part, output, where, rows, encode_scale, table)
            if const_expr(self.tall):
                held.append((codes, column, band))
            else:
                cute.arch.sync_warp()  # all of these columns have been read
                self.put(part, codes, column, band)
        cute.arch.sync_threads()
        if const_expr(self.tall):
            for i in range_constexpr(len(held)):
                self.put(part, *held[i])
            cute.arch.sync_threads()
        self.pieces.copy(part, data, rows.apart)

    def put(self, part, codes, column, band):
        """Put down pieces of two columns of a band."""
        target = self.pieces.at(part.address, column // 2, band)
        for k in range(2):
            ptx.store_shared(target + k * self.pieces.pitch, codes[k], PIECE)

    @cute.jit
    def quantize(self, part, output, where, rows, encode_scale, table):
        """Codes of two columns of a band, whose scales are put down; ``where`` is their address,
        the band and the first of them."""
        config, encoder, place, size = self.config, self.encoder, self.place, self.block_size
        itemsize = config.dtype.itemsize
        (start, band, column), (staged, data) = where, output
        squares = rows.applied.squares
        codes = [[], []]
        held, corrected = [], []
        for j in range_constexpr(BAND // size):
            top = rows.start + band * BAND + j * size
            if const_expr(len(held) == 0):  # rows that are transformed together
                count = max(size, min(config.hadamard, BAND))
                first = start + j * size * PANEL * itemsize
                held = self.load(first, count, rows.applied.transform)
                if const_expr(config.scaling == "ms_eden"):
                    first = top, part.column + column
                    corrected = self.corrected(held, first, rows.applied, encode_scale[0], table)
            words, held = held[:size], held[size:]
            if const_expr(squares is not None):
                first = band * BAND + j * size
                amax, code, reciprocal = squares.scale(first, column, encode_scale, table)
                amaxes, scales = [amax] * 2, [(code, reciprocal)] * 2
            else:
                states = [encoder.states(list(column)) for column in zip(*words, strict=True)]
                amaxes = [amax for state in states for amax in encoder.amaxes(state)]
                if const_expr(config.scaling == "ms_eden"):
                    scales, corrected = corrected[0], corrected[1:]
                elif const_expr(config.scaling == "four_over_six"):
                    scales = self.better(words, amaxes, encode_scale, table)
                else:
                    scales = [encoder.scale(amax, encode_scale, table) for amax in amaxes]
            reciprocals = [reciprocal for _, reciprocal in scales]
            noise = None
            if const_expr(rows.applied.noise is not None):
                noise = rows.applied.noise.of_pairs(top, part.column + column, size)
            packed = encoder.elements_of_columns(words, amaxes, reciprocals, noise)
            for k in range_constexpr(2):
                target = staged + place.place(column + k, band * (BAND // size) + j)
                code = scales[k][0]
                if const_expr(squares is not None):  # padding is zero
                    code = select_(part.column + column + k < data.shape[0], code, Uint32(0))
                ptx.store_shared(target, [code], place.itemsize)
                codes[k] += packed[k]
        return codes

    def better(self, words: list, amaxes: list, encode_scales: list, table) -> list:
        """Scales of two columns, each the better of two."""
        columns = zip(*map(self.encoder.magnitudes, words), strict=True)
        return [
            better_scale(self.encoder, list(column), amax, encode_scales, table)
            for column, amax in zip(columns, amaxes, strict=True)
        ]

    def corrected(self, words: list, where, applied, encode_scale, table) -> list:
        """Scales of two columns of each block of rows of ``words``, the first at ``where``."""
        size, (row, column) = self.block_size, where
        starts = range(0, len(words), size)
        noise = [applied.scale_noise.of_pair(row + i, column) for i in starts]
        given = encode_scale, table
        found = [
            corrected_scales(
                self.encoder,
                [list(column[i : i + size]) for i in starts],
                *given,
                list(bits),
                applied.transform.distances_of_columns,
            )
            for column, bits in zip(zip(*words, strict=True), zip(*noise, strict=True), strict=True)
        ]
        return [list(each) for each in zip(*found, strict=True)]

    def load(self, start, count: int, transform) -> list:
        """Words of two columns of each of ``count`` rows, transformed if they are to be."""
        itemsize = self.config.dtype.itemsize
        rows = [
            ptx.load_shared(start + row * PANEL * itemsize, 2 * itemsize) for row in range(count)
        ]
        return rows if transform is None else transform.of_columns(rows)
