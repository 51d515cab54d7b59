# mypy: ignore-errors
"""The quantizer: one read of a tile, its blocks along rows, along columns, or both.

A block of threads loads one tile, by one wait on TMA, into shared memory as panels of 128 columns.

Rows: eight lanes take a "strip", 128 columns of one row, 16 elements each, so that a warp stores
four rows of 128 bytes. Columns: a warp takes 32 rows of a panel, a lane 8 rows of 16 columns.
Scales go through shared memory (see ``scales``): whoever has one puts it down, and after a barrier
all threads copy them out.

The tile hangs over the edges of the matrix: it reads zeros there, whose scales and elements are the
padding.
"""

from __future__ import annotations

import cutlass
import torch
from cutlass import Int32, Int64, Uint32, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ...formats import get_format
from . import ptx
from .config import PANEL, Config
from .encode import Encoder
from .scales import staging

__all__ = ["NUMERIC", "Quantizer"]

NUMERIC = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
}
_ELEMENTS = 16  # of one lane at a time
_STRIP_LANES = PANEL // _ELEMENTS
_BAND = 32  # rows of a block along a column
_LANE_ROWS = _BAND // (32 // _STRIP_LANES)
_DEEP = 1 << 15  # tiles down the rows in one layer of the grid


class Quantizer:
    """The kernel of a :class:`Config` and the host code that launches it."""

    def __init__(self, config: Config):
        self.config = config
        self.format = get_format(config.format)
        self.encoder = Encoder(
            config.spec,
            self.format.element.name.lower(),
            config.dtype,
            config.arch.startswith("sm_10"),
        )
        rows, columns, size = config.tile_rows, config.tile_columns, self.format.block_size
        self.tall = size > _BAND and (-2 in config.axes or self.format.block[0] > 1)
        high = self.format.block[0]  # across the contraction
        extent = {-1: (rows // high, columns // size), -2: (columns // high, rows // size)}
        self.stagings = {
            axis: staging(config.layout, axis, *extent[axis], self.format.scale.nbytes, store)
            for axis, store in zip(config.axes, config.scale_stores, strict=True)
        }

    @cute.jit
    def __call__(self, x, row_data, row_scale, column_data, column_scale, global_scale, stream):
        """Launch. ``x`` (M, K); data as uint8 (rows, bytes); scales in any shape; None for an axis
        that is not asked for; ``global_scale`` (1,) fp32 or None.
        """
        config = self.config
        atom, view = None, None
        if const_expr(config.tma):
            panel = cute.make_layout((config.tile_rows, PANEL), stride=(PANEL, 1))
            atom, view = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(), x, panel, (config.tile_rows, PANEL)
            )
        down = cute.ceil_div(x.shape[0], config.tile_rows)
        across = cute.ceil_div(x.shape[1], config.tile_columns)
        self.kernel(
            atom, view, x, row_data, row_scale, column_data, column_scale, global_scale
        ).launch(
            grid=(across, cutlass.min(down, _DEEP), cute.ceil_div(down, _DEEP)),
            block=(config.threads, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, atom, view, x, row_data, row_scale, column_data, column_scale, global_scale):
        config = self.config
        thread = cute.arch.thread_idx()[0]
        across, down, layer = cute.arch.block_idx()
        down = layer * _DEEP + down
        start = (down * config.tile_rows, across * config.tile_columns)

        memory = cutlass.memory.SmemAllocator()
        panels = cute.make_layout(
            (config.tile_rows, PANEL, config.panels), stride=(PANEL, 1, config.tile_rows * PANEL)
        )
        tile = memory.allocate_tensor(NUMERIC[config.dtype], panels, byte_alignment=128)
        barrier = memory.allocate_array(cutlass.Int64, 1)
        staged = {
            axis: memory.allocate_array(cutlass.Uint8, it.nbytes, byte_alignment=16).toint()
            for axis, it in self.stagings.items()
        }
        maxima = None  # of 32 rows of each column, where a block has more of them
        if const_expr(self.tall):
            count = config.tile_rows // _BAND * PANEL
            maxima = memory.allocate_array(cutlass.Uint32, count, byte_alignment=16).toint()
        if const_expr(config.unused_shared):
            memory.allocate_array(cutlass.Uint8, config.unused_shared)
        if const_expr(config.tma):
            self.start_load(atom, view, tile, barrier, down, across)
        else:
            self.load(x, tile.iterator.toint(), start)
        encode_scale, table = None, None
        if const_expr(self.encoder.has_table):
            table = memory.allocate_array(cutlass.Uint32, 128).toint()
            value = global_scale[0]
            encode_scale = self.encoder.encode_scale(value)
            for i in range_constexpr(128 // config.threads):
                code = Uint32(thread + i * config.threads)
                entry = self.encoder.table_entry(code, value)
                ptx.store_shared(table + Int32(code) * 4, [entry], 4)
        if const_expr(not config.tma or self.encoder.has_table):
            cute.arch.sync_threads()
        if const_expr(config.tma):
            cute.arch.mbarrier_wait(barrier, 0)

        address = tile.iterator.toint()
        high, size = self.format.block
        if const_expr(-1 in config.axes):
            if const_expr(high == 1):
                self.rows(address, staged[-1], row_data, start, x.shape, encode_scale, table)
            else:
                self.columns(-1, address, staged[-1], maxima, row_data, start, x.shape)
        if const_expr(-2 in config.axes):
            self.columns(-2, address, staged[-2], maxima, column_data, start, x.shape)
        cute.arch.sync_threads()
        m, k = x.shape[0], x.shape[1]
        if const_expr(-1 in config.axes):
            first = start[0] // high, start[1] // size
            shape = cute.ceil_div(m, high), cute.ceil_div(k, size)
            self.copy_scales(self.stagings[-1], staged[-1], row_scale, first, shape)
        if const_expr(-2 in config.axes):
            first = start[1] // high, start[0] // size
            shape = cute.ceil_div(k, high), cute.ceil_div(m, size)
            self.copy_scales(self.stagings[-2], staged[-2], column_scale, first, shape)

    # --- loads ------------------------------------------------------------------------------------

    @cute.jit
    def start_load(self, atom, view, tile, barrier, down, across):
        """Load the panels of a tile; the barrier's first phase ends when all are there."""
        config = self.config
        thread = cute.arch.thread_idx()[0]
        source = cute.local_tile(view, (config.tile_rows, PANEL), (None, None))
        shared, tiles = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(tile, 0, 2),
            cute.group_modes(source, 0, 2),
        )
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if thread == 0:
            nbytes = config.tile_rows * config.tile_columns * config.dtype.itemsize
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, nbytes)
        if thread < 32:
            for panel in range_constexpr(config.panels):
                cute.copy(
                    atom,
                    tiles[(None, down, across * config.panels + panel)],
                    shared[(None, panel)],
                    tma_bar_ptr=barrier,
                )

    @cute.jit
    def load(self, x, address, start):
        """Load a tile an element at a time: for strides and addresses that TMA cannot take."""
        config, size = self.config, self.config.dtype.itemsize
        base, stride = x.iterator.toint(), Int64(x.stride[0])
        thread = cute.arch.thread_idx()[0]
        for i in range(config.tile_rows * config.tile_columns // config.threads):
            index = i * config.threads + thread
            strip = index // PANEL
            row = start[0] + strip % config.tile_rows
            column = start[1] + strip // config.tile_rows * PANEL + index % PANEL
            value = Uint32(0)
            if row < x.shape[0] and column < x.shape[1]:
                value = ptx.load_global(base + (row * stride + column) * size, size)
            ptx.store_shared(address + index * size, [value], size)

    def words(self, address, itemsize: int = 0) -> list:
        """16 elements of shared memory, of the input unless ``itemsize`` is given."""
        nbytes = _ELEMENTS * (itemsize or self.config.dtype.itemsize)
        return [w for i in range(0, nbytes, 16) for w in ptx.load_shared(address + i, 16)]

    # --- blocks along rows ------------------------------------------------------------------------

    @cute.jit
    def rows(self, address, staged, data, start, shape, encode_scale, table):
        config, encoder, place = self.config, self.encoder, self.stagings[-1]
        thread = cute.arch.thread_idx()[0]
        lane = thread % _STRIP_LANES
        lanes = self.format.block_size // _ELEMENTS  # of a block
        stored = _ELEMENTS * config.spec.bits // 8
        pitch = data.shape[1]
        step = config.threads // _STRIP_LANES
        for i in range_constexpr(config.tile_rows * config.panels // step):
            strip = i * step + thread // _STRIP_LANES
            row, panel = strip % config.tile_rows, strip // config.tile_rows
            offset = (strip * PANEL + lane * _ELEMENTS) * config.dtype.itemsize
            words = self.words(address + offset)
            state = encoder.states(words)
            for j in range_constexpr(lanes.bit_length() - 1):
                other = cute.arch.shuffle_sync_bfly(state, 1 << j)
                state = encoder.merge(state, other)
            amax = encoder.amax(state)
            code, reciprocal = encoder.scale(amax, encode_scale, table)
            if const_expr(self.stagings[-1].pad > 1):  # of zeros: padding is zero, though
                code = cutlass.select_(start[0] + row < shape[0], code, Uint32(0))
            if lane % lanes == 0:
                block = panel * (PANEL // self.format.block_size) + lane // lanes
                nbytes = self.format.scale.nbytes
                ptx.store_shared(staged + place.place(row, block), [code], nbytes)
            codes = encoder.elements(words, [amax] * _ELEMENTS, [reciprocal] * _ELEMENTS)
            row = start[0] + row
            column = (start[1] + panel * PANEL) * config.spec.bits // 8 + lane * stored
            if row < shape[0] and column < pitch:
                ptx.store_global(data.iterator.toint() + Int64(row) * pitch + column, codes, stored)

    # --- blocks along columns ---------------------------------------------------------------------

    @cute.jit
    def columns(self, axis, address, staged, maxima, data, start, shape):
        """Blocks of 32 or 128 rows and one column, or of 128 x 128 for either axis."""
        config, encoder, place = self.config, self.encoder, self.stagings[axis]
        thread = cute.arch.thread_idx()[0]
        lane, group, warp = thread % _STRIP_LANES, thread % 32 // _STRIP_LANES, thread // 32
        bands = config.tile_rows // _BAND
        row_bytes = PANEL * config.dtype.itemsize
        for i in range_constexpr(bands * config.panels // config.warps):
            unit = i * config.warps + warp
            band, panel = unit % bands, unit // bands
            row = band * _BAND + group * _LANE_ROWS
            column = panel * PANEL + lane * _ELEMENTS
            first = address + (panel * config.tile_rows + row) * row_bytes
            first = first + lane * _ELEMENTS * config.dtype.itemsize

            states = [encoder.state(word) for word in self.words(first)]
            for j in range_constexpr(1, _LANE_ROWS):
                words = [encoder.state(word) for word in self.words(first + j * row_bytes)]
                states = [encoder.merge(s, w) for s, w in zip(states, words, strict=True)]
            for distance in (8, 16):
                states = [
                    encoder.merge(s, cute.arch.shuffle_sync_bfly(s, distance)) for s in states
                ]
            amaxes = [amax for state in states for amax in encoder.amaxes(state)]
            if const_expr(self.tall):
                mine = maxima + lane * _ELEMENTS * 4
                for j in range_constexpr(_ELEMENTS):
                    if group == j // (_ELEMENTS // 4):
                        ptx.store_shared(mine + band * PANEL * 4 + j * 4, [amaxes[j]], 4)
                cute.arch.sync_threads()
                if const_expr(self.format.block[0] > 1):
                    amaxes, reciprocals = self.square_scale(place, staged, maxima)
                else:
                    self.tall_scales(place, staged, maxima, start[1], shape[1])
                    cute.arch.sync_threads()
                    reciprocals = self.words(mine, 4)
                    if const_expr(not config.spec.propagate):
                        amaxes = self.words(mine + PANEL * 4, 4)
            else:
                scales = [encoder.scale(amax) for amax in amaxes]
                reciprocals = [reciprocal for _, reciprocal in scales]
                for j in range_constexpr(_ELEMENTS):
                    if group == j // (_ELEMENTS // 4):
                        where = staged + place.place(column + j, band)
                        ptx.store_shared(where, [scales[j][0]], self.format.scale.nbytes)
            for j in range_constexpr(_LANE_ROWS):
                words = self.words(first + j * row_bytes)
                elements = encoder.elements(words, amaxes, reciprocals)
                self.store_columns(elements, data, start[0] + row + j, start[1] + column)

    @cute.jit
    def tall_scales(self, place, staged, maxima, start, columns):
        """Scales of blocks of 128 rows and one column, a thread each, from ``maxima`` (4, 128).

        Reciprocals replace the first row of ``maxima``, maxima of whole blocks the second.
        """
        thread = cute.arch.thread_idx()[0]
        mine = maxima + thread * 4
        bands = range(self.config.tile_rows // _BAND)
        amax = cutlass.max(*(ptx.load_shared(mine + i * PANEL * 4, 4)[0] for i in bands))
        code, reciprocal = self.encoder.scale(amax)
        if const_expr(place.pad > 1):  # of zeros: padding is zero, though
            code = cutlass.select_(start + thread < columns, code, Uint32(0))
        ptx.store_shared(staged + place.place(thread, 0), [code], self.format.scale.nbytes)
        ptx.store_shared(mine, [reciprocal], 4)
        ptx.store_shared(mine + PANEL * 4, [amax], 4)

    @cute.jit
    def square_scale(self, place, staged, maxima):
        """The scale of a block of 128 x 128 from ``maxima`` (4, 128): its maximum and
        reciprocal, for each of 16 elements.
        """
        thread = cute.arch.thread_idx()[0]
        count = self.config.tile_rows // _BAND * PANEL // 32  # of a lane
        found = cutlass.max(*self.words(maxima + thread % 32 * count * 4, 4))
        for distance in (1, 2, 4, 8, 16):
            found = cutlass.max(found, cute.arch.shuffle_sync_bfly(found, distance))
        code, reciprocal = self.encoder.scale(found)
        if thread == 0:
            ptx.store_shared(staged + place.place(0, 0), [code], self.format.scale.nbytes)
        cute.arch.sync_threads()  # the other axis may come next
        return [found] * _ELEMENTS, [reciprocal] * _ELEMENTS

    @cute.jit
    def store_columns(self, words, data, row, column):
        """Store 16 bytes of a row of column-wise data."""
        rows, columns = data.shape
        address = data.iterator.toint() + Int64(row) * columns + column
        if const_expr(self.config.column_store == 16):
            if row < rows and column < columns:
                ptx.store_global(address, words, 16)
        else:
            for i in range_constexpr(16):
                if row < rows and column + i < columns:
                    ptx.store_global(address + i, [words[i // 4] >> (8 * (i % 4))], 1)

    # --- scales -----------------------------------------------------------------------------------

    @cute.jit
    def copy_scales(self, place, staged, scale, start, shape):
        """Copy a tile's scales from shared to global memory."""
        thread = cute.arch.thread_idx()[0]
        nbytes, threads = place.vector, self.config.threads
        total = place.nbytes // nbytes
        for i in range_constexpr(cute.ceil_div(total, threads)):
            index = i * threads + thread
            if index < total:
                position = index * nbytes
                line, within = position // place.line_bytes, position % place.line_bytes
                offset, valid = place.line(line, start, shape)
                if within < valid:
                    words = ptx.load_shared(staged + position, nbytes)
                    ptx.store_global(scale.iterator.toint() + offset + within, words, nbytes)
