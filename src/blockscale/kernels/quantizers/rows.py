# mypy: ignore-errors
"""Blocks along the rows of a tile in shared memory.

Eight lanes take a "strip", 128 columns of one row, 16 elements each, so that a warp stores four
rows of 128 bytes.
"""

from __future__ import annotations

from cutlass import Int64, Uint32, const_expr, cute, range_constexpr, select_

from ..common import ptx
from ..common.encode import Encoder
from ..common.four_over_six import better_scale
from ..common.ms_eden import corrected_scales
from .config import PANEL, Config
from .scales import Staging
from .tile import ELEMENTS, STRIP_LANES, lane_order

__all__ = ["Rows"]


class Rows:
    def __init__(self, config: Config, encoder: Encoder, block_size: int, place: Staging):
        self.config, self.encoder, self.place = config, encoder, place
        self.block_size = block_size

    @cute.jit
    def __call__(self, tiles, loaded, parts, outputs, rows, encode_scale, table, made):
        """Quantize the parts of a tile. ``loaded`` is what ``tiles`` made, ``outputs`` a scale's
        address in shared memory and data in global memory for each part, ``rows`` which rows of
        the tensor they are. ``made``: parts are in memory.
        """
        config = self.config
        thread = cute.arch.thread_idx()[0]
        column = thread % STRIP_LANES * ELEMENTS
        step = config.threads // STRIP_LANES
        order = lane_order(config, thread % STRIP_LANES)
        for i in range_constexpr(config.loaded_rows * config.panels // step):
            strip = i * step + thread // STRIP_LANES
            row, panel = strip % config.loaded_rows, strip // config.loaded_rows
            offset = (strip * PANEL + column) * config.dtype.itemsize
            found = tiles.fetch(loaded, offset, order, made=made)
            if const_expr(rows.applied.transform is not None):
                found = [rows.applied.transform.of_row(words) for words in found]
            for j in range_constexpr(len(parts)):
                where = row, panel * PANEL + column
                self.strip(parts[j], found[j], where, outputs[j], rows, encode_scale, table, order)

    @cute.jit
    def strip(self, part, words, where, output, rows, encode_scale, table, order=None):
        """Quantize 16 elements, ``words``, of a row; lanes side by side share blocks.

        ``where`` is their row and column in the tile.
        """
        config, encoder, place = self.config, self.encoder, self.place
        staged, data = output
        row, column = where
        bits, lanes = config.spec.bits, self.block_size // ELEMENTS  # of a block
        stored = ELEMENTS * bits // 8
        pitch = data.shape[1]
        stop = pitch if const_expr(part.stop is None) else part.stop * bits // 8
        squares = rows.applied.squares
        if const_expr(squares is not None):
            amax, code, reciprocal = squares.scale(row, column, encode_scale, table)
        else:
            state = encoder.states(words)
            for j in range_constexpr(lanes.bit_length() - 1):
                state = encoder.merge(state, cute.arch.shuffle_sync_bfly(state, 1 << j))
            amax = encoder.amax(state)
            if const_expr(config.scaling == "four_over_six"):
                magnitudes = encoder.magnitudes(words)
                code, reciprocal = better_scale(encoder, magnitudes, amax, encode_scale, table)
            elif const_expr(config.scaling == "ms_eden"):
                code, reciprocal = self.corrected(part, words, where, rows, encode_scale[0], table)
            else:
                code, reciprocal = encoder.scale(amax, encode_scale, table)
        if const_expr(place.pad > 1 or config.spread or squares is not None):  # padding is zero
            last = rows.scale_stop if const_expr(config.spread or not config.grouped) else rows.stop
            code = select_(rows.start + row < last, code, Uint32(0))
        if column // ELEMENTS % lanes == 0:
            target = staged + place.place(row, column // self.block_size)
            ptx.store_shared(target, [code], place.itemsize)
        noise = rows.random(part, where, order)
        codes = encoder.elements(words, [amax] * ELEMENTS, [reciprocal] * ELEMENTS, noise)
        codes = encoder.in_order(codes, order)
        row = rows.start + row
        column = (part.column + column) * bits // 8
        if row < rows.stop and column < stop:
            ptx.store_global(data.iterator.toint() + Int64(row) * pitch + column, codes, stored)

    def corrected(self, part, words, where, rows, encode_scale, table) -> tuple:
        """Scale and reciprocal of a block whose scale is corrected."""
        applied, (row, column) = rows.applied, where
        noise = applied.scale_noise.of_element(rows.start + row, part.column + column)
        distances = applied.transform.distances_of_rows
        return corrected_scales(self.encoder, [words], encode_scale, table, [noise], distances)[0]
