# mypy: ignore-errors
"""Blocks along the columns of a tile in shared memory, and blocks of 128 x 128.

A warp takes 32 rows of a panel, "a band", or of half a panel, or 16 rows; a lane 8 or 4 rows of 16
columns. Taller blocks are put together of bands through shared memory.

The same walk over the tile quantizes rows, too. Data lies in global memory as the tile does, or
column by column: then it takes the place of what it was made of, and is copied out in ``pieces``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, const_expr, cute, range_constexpr, select_

from ..common import ptx
from ..common.encode import Encoder
from .config import BAND, PANEL, Config
from .pieces import PIECE, Pieces
from .rows import Rows
from .scales import Staging
from .tile import ELEMENTS, STRIP_LANES, lane_order, load_words

__all__ = ["Columns", "Target"]


@dataclass(frozen=True)
class Target:
    """Where a part of a tile goes: for each, a scale's address in shared memory, and data in global
    memory.

    Attributes:
        blocks: what :class:`Columns` quantizes.
        rows: the same values along rows, if they are asked for too.
    """

    blocks: Any
    rows: Any


class Columns:
    def __init__(
        self,
        config: Config,
        encoder: Encoder,
        block: tuple[int, int],
        place: Staging,
        also: Rows | None,
        pieces: Pieces | None,
    ):
        self.config, self.encoder, self.place = config, encoder, place
        self.also, self.pieces = also, pieces
        self.square = block[0] > 1
        self.tall = self.square or (block[1] > BAND and not config.square)
        self.block_size = block[1]
        self.bands = config.loaded_rows // config.band
        whole = self.bands * config.panels % config.warps == 0
        self.lanes = STRIP_LANES if whole else STRIP_LANES // 2  # side by side
        self.depth = self.lanes * config.band // BAND  # rows of a lane
        # a lane of ``square_scale`` reads 16 maxima
        assert not self.square or self.bands * PANEL == 32 * ELEMENTS

    def allocate(self, memory):
        """Maxima of each column of each band, where a block has more than one of them."""
        if not self.tall:
            return None
        count = self.bands * PANEL
        return memory.allocate_array(cutlass.Uint32, count, byte_alignment=16).toint()

    @cute.jit
    def __call__(self, tiles, loaded, parts, targets, maxima, rows, width, made):
        """Quantize the parts of a tile. ``loaded`` is what ``tiles`` made, ``targets`` where each
        part goes, ``rows`` which rows of the tensor they are, ``width`` how many columns it has.
        ``made``: parts are in memory.
        """
        config, encoder = self.config, self.encoder
        itemsize = config.dtype.itemsize
        thread = cute.arch.thread_idx()[0]
        lanes, bands = self.lanes, self.bands
        lane, group, warp = thread % lanes, thread % 32 // lanes, thread // 32
        halves = STRIP_LANES // lanes
        row_bytes = PANEL * itemsize
        order = lane_order(config, lane)
        for i in range_constexpr(bands * config.panels * halves // config.warps):
            unit = i * config.warps + warp
            band, panel = unit // halves % bands, unit // halves // bands
            row = band * config.band + group * self.depth
            column = (unit % halves * lanes + lane) * ELEMENTS
            first = ((panel * config.loaded_rows + row) * PANEL + column) * itemsize
            column = panel * PANEL + column

            states = [None] * len(parts)
            alone = rows.applied.squares is not None  # and not the rows' maxima
            walked = 0 if const_expr(alone and self.also is None) else self.depth
            for j in range_constexpr(walked):
                start = first + j * row_bytes
                found = tiles.fetch(loaded, start, order, keep=True, made=made)
                for k in range_constexpr(len(parts)):
                    if const_expr(self.also is not None):
                        where = row + j, column
                        self.also.strip(
                            parts[k], found[k], where, targets[k].rows, rows, None, None, order
                        )
                    if const_expr(not alone):
                        words = [encoder.state(word) for word in found[k]]
                        if const_expr(j > 0):
                            pairs = zip(states[k], words, strict=True)
                            words = [encoder.merge(*pair) for pair in pairs]
                        states[k] = words
            for k in range_constexpr(len(parts)):
                where = (row, column), group, band, first
                self.finish(
                    parts[k], states[k], where, targets[k].blocks, maxima, rows, width, order
                )
        if const_expr(self.pieces is not None):
            if const_expr(not self.tall):  # else all have met already
                cute.arch.sync_threads()
            for k in range_constexpr(len(parts)):
                self.pieces.copy(parts[k], targets[k].blocks[1], rows.apart)

    @cute.jit
    def finish(self, part, states, where, output, maxima, rows, width, order):
        """Scales and elements of a lane's columns, of whose rows ``states`` are the maxima."""
        config, encoder, place = self.config, self.encoder, self.place
        (row, column), group, band, first = where
        staged, data = output
        lanes, groups, itemsize = self.lanes, 32 // self.lanes, config.dtype.itemsize
        stop = data.shape[1] if const_expr(part.stop is None) else part.stop
        row_stop = data.shape[0] if const_expr(not config.grouped) else rows.stop
        squares = rows.applied.squares
        if const_expr(squares is None):
            for j in range_constexpr(groups.bit_length() - 1):
                distance = lanes << j
                states = [
                    encoder.merge(s, cute.arch.shuffle_sync_bfly(s, distance)) for s in states
                ]
            amaxes = [amax for state in states for amax in encoder.amaxes(state)]
        if const_expr(squares is not None):
            amaxes, reciprocals = self.of_squares(part, where, staged, squares, width)
        elif const_expr(self.tall):
            mine = maxima + column % PANEL * 4
            for j in range_constexpr(ELEMENTS):
                if group == j // (ELEMENTS // groups):
                    ptx.store_shared(mine + band * PANEL * 4 + _at(j, order) * 4, [amaxes[j]], 4)
            cute.arch.sync_threads()
            if const_expr(self.square):
                amaxes, reciprocals = self.square_scale(staged, maxima)
            else:
                self.tall_scales(staged, maxima, part.column, width)
                cute.arch.sync_threads()
                reciprocals = load_words(mine, 4, order)
                if const_expr(not config.spec.propagate):
                    amaxes = load_words(mine + PANEL * 4, 4, order)
        else:
            scales = [encoder.scale(amax) for amax in amaxes]
            reciprocals = [reciprocal for _, reciprocal in scales]
            for j in range_constexpr(ELEMENTS):
                if group == j // (ELEMENTS // groups):
                    target = staged + place.place(column + _at(j, order), band)
                    ptx.store_shared(target, [scales[j][0]], place.itemsize)
        if const_expr(self.pieces is not None):
            self.put(part, (row, column), first, amaxes, reciprocals, order, rows)
        else:
            for j in range_constexpr(self.depth):
                start = part.address + first + j * PANEL * itemsize
                words = load_words(start, itemsize, order)
                noise = rows.random(part, (row, column), order, j)
                elements = encoder.elements(words, amaxes, reciprocals, noise)
                elements = encoder.in_order(elements, order)
                if const_expr(config.grouped):  # the tail is zero
                    owned = rows.start < rows.scale_stop
                    elements = [Uint32(select_(owned, word, Uint32(0))) for word in elements]
                where = rows.start + row + j, part.column + column
                self.store(elements, data, where, (row_stop, stop))
        if const_expr(self.tall):  # ``maxima`` may be used again
            cute.arch.sync_threads()

    @cute.jit
    def of_squares(self, part, where, staged, squares, width):
        """Maximum and reciprocal of a lane's square, for each of 16 columns, whose scales the first
        of a square's bands puts down."""
        (row, column), group, band, _ = where
        place, size, groups = self.place, self.block_size, 32 // self.lanes
        amax, code, reciprocal = squares.scale(row, column)
        for j in range_constexpr(ELEMENTS):
            first = group == j // (ELEMENTS // groups) and band * self.config.band % size == 0
            if first:
                within = part.column + column + j < width  # else it is padding, and zero
                target = staged + place.place(column + j, row // size)
                mine = Uint32(select_(within, code, Uint32(0)))
                ptx.store_shared(target, [mine], place.itemsize)
        return [amax] * ELEMENTS, [reciprocal] * ELEMENTS

    @cute.jit
    def tall_scales(self, staged, maxima, start, columns):
        """Scales of blocks of 128 rows and one column, a thread each, from ``maxima`` (bands, 128).

        Reciprocals replace the first row of ``maxima``, maxima of whole blocks the second.
        """
        place, thread = self.place, cute.arch.thread_idx()[0]
        mine = maxima + thread * 4
        if thread < PANEL:
            bands = range(self.bands)
            amax = cutlass.max(*(ptx.load_shared(mine + i * PANEL * 4, 4)[0] for i in bands))
            code, reciprocal = self.encoder.scale(amax)
            if const_expr(place.pad > 1):  # of zeros: padding is zero, though
                code = select_(start + thread < columns, code, Uint32(0))
            ptx.store_shared(staged + place.place(thread, 0), [code], place.itemsize)
            ptx.store_shared(mine, [reciprocal], 4)
            ptx.store_shared(mine + PANEL * 4, [amax], 4)

    @cute.jit
    def square_scale(self, staged, maxima):
        """The scale of a block of 128 x 128 from ``maxima`` (4, 128): its maximum and
        reciprocal, for each of 16 elements.
        """
        thread = cute.arch.thread_idx()[0]
        count = self.bands * PANEL // 32  # of a lane
        found = cutlass.max(*load_words(maxima + thread % 32 * count * 4, 4))
        for distance in (1, 2, 4, 8, 16):
            found = cutlass.max(found, cute.arch.shuffle_sync_bfly(found, distance))
        code, reciprocal = self.encoder.scale(found)
        if thread == 0:
            where = staged + self.place.place(0, 0)
            ptx.store_shared(where, [code], self.place.itemsize)
        return [found] * ELEMENTS, [reciprocal] * ELEMENTS

    @cute.jit
    def put(self, part, where, first, amaxes, reciprocals, order, rows):
        """Replace a lane's rows of 16 columns by the pieces, or parts of them, made of them."""
        row, column = where
        itemsize, codes = self.config.dtype.itemsize, [[] for _ in range(ELEMENTS)]
        for j in range_constexpr(0, self.depth, 4):  # a word of each column
            start = part.address + first + j * PANEL * itemsize
            words = [load_words(start + i * PANEL * itemsize, itemsize, order) for i in range(4)]
            noise = [rows.random(part, where, order, j + i) for i in range(4)]
            noise = None if noise[0] is None else noise
            found = self.encoder.elements_of_columns(words, amaxes, reciprocals, noise)
            for k in range_constexpr(ELEMENTS):
                codes[k] += found[k]
        cute.arch.sync_warp()  # all of the warp's rows have been read
        target = self.pieces.at(part.address, column // ELEMENTS, row // PIECE) + row % PIECE
        for k in range_constexpr(ELEMENTS):
            ptx.store_shared(target + _at(k, order) * self.pieces.pitch, codes[k], self.depth)

    @cute.jit
    def store(self, words, data, where, stop):
        """Store 16 bytes of a row of column-wise data."""
        row, column = where
        address = data.iterator.toint() + Int64(row) * data.shape[1] + column
        if const_expr(self.config.column_store == 16):
            if row < stop[0] and column < stop[1]:
                ptx.store_global(address, words, 16)
        else:
            for i in range_constexpr(16):
                if row < stop[0] and column + i < stop[1]:
                    ptx.store_global(address + i, [words[i // 4] >> (8 * (i % 4))], 1)


def _at(i: int, order):
    """Which of 16 columns a lane reads as its ``i``-th, in its ``order``."""
    return i if order is None else Int32(order ^ i)
