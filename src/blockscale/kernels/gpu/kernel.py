# mypy: ignore-errors
"""The quantizer: one read of a tile, its blocks along rows, along columns, or both.

A block of threads loads a tile (``tile``) and quantizes it along rows (``rows``), columns
(``columns``) or both. Scales go through shared memory (``scales``): whoever has one puts it down,
and after a barrier all threads copy them out.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Uint32, const_expr, cute, range_constexpr
from cutlass.cute.runtime import make_fake_stream

from ...formats import get_format
from . import ptx
from .any_tensor import any_tensor
from .columns import Columns
from .config import PRODUCERS, Config
from .encode import Encoder
from .groups import TileRows, find_rows, scale_rows, tile_count
from .packed import PackedColumns
from .rows import Rows
from .scales import staging
from .tile import NUMERIC, Tiles

__all__ = ["Quantizer", "compile_config", "fake_sources"]

_DEEP = 1 << 15  # tiles down the rows in one layer of the grid
_SCALES = {1: cutlass.Uint8, 4: cutlass.Float32}
_MATRICES = ("compact", "sm90", "packed")  # layouts whose scales are stored with two dimensions


class Quantizer:
    """The kernel of a :class:`Config` and the host code that launches it."""

    def __init__(self, config: Config):
        self.config = config
        self.format = get_format(config.format)
        self.tiles = Tiles(config)
        blackwell = config.arch.startswith("sm_10")
        self.encoder = Encoder(
            config.spec, self.format.element.name.lower(), config.dtype, blackwell
        )
        rows, columns, size = config.tile_rows, config.tile_columns, self.format.block_size
        high = self.format.block[0]  # across the contraction
        extent = {-1: (rows // high, columns // size), -2: (columns // high, rows // size)}
        self.stagings = {
            axis: staging(layout, axis, *extent[axis], self.format.scale.nbytes, store)
            for axis, layout, store in zip(
                config.axes, config.layouts, config.scale_stores, strict=True
            )
        }
        self.rows = self.packed = None
        self.columns = {}
        for axis, place in self.stagings.items():
            if axis == -1 and high == 1:
                self.rows = Rows(config, self.encoder, size, place)
            elif config.spec.bits < 8:
                self.packed = PackedColumns(config, self.encoder, size, place)
            else:
                also = self.rows
                self.columns[axis] = Columns(config, self.encoder, self.format.block, place, also)

    @cute.jit
    def __call__(
        self, sources, row_data, row_scale, column_data, column_scale, global_scale, offsets, stream
    ):
        """Launch. ``sources`` (M, K) each; data as uint8 (rows, bytes); scales in any shape; None
        for an axis that is not asked for; ``global_scale`` (1,) fp32 and ``offsets`` (groups,)
        int32, or None. Packed data along columns is (columns, bytes).
        """
        config = self.config
        atoms, views = self.tiles.descriptors(sources)
        rows, columns = sources[0].shape
        down = cute.ceil_div(rows, config.tile_rows)
        if const_expr(config.grouped):
            down = tile_count(rows, offsets.shape[0])
        outputs = {-1: (row_data, row_scale), -2: (column_data, column_scale)}
        self.kernel(atoms, views, sources, outputs, global_scale, offsets).launch(
            grid=(
                cute.ceil_div(columns, config.tile_columns),
                cutlass.min(down, _DEEP),
                cute.ceil_div(down, _DEEP),
            ),
            block=(config.threads, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, atoms, views, sources, outputs, global_scale, offsets):
        config, size = self.config, self.format.block_size
        across, down, layer = cute.arch.block_idx()
        down = layer * _DEEP + down
        m, k = sources[0].shape
        row, column = down * config.tile_rows, across * config.tile_columns
        if const_expr(config.grouped):
            rows = find_rows(down, offsets, m, size)
        else:
            rows = TileRows(row, m, m, row, row // size)

        memory = cutlass.memory.SmemAllocator()
        tiles, barrier = self.tiles.allocate(memory)
        parts = self.tiles.parts(sources, tiles, column)
        staged = {
            axis: [self.allocate(memory, place.nbytes) for _ in parts]
            for axis, place in self.stagings.items()
        }
        maxima = table = None
        for along in list(self.columns.values())[:1]:
            maxima = along.allocate(memory)
        if const_expr(self.encoder.has_table):
            table = self.allocate(memory, 128 * 4)
        if const_expr(config.unused_shared):
            memory.allocate_array(cutlass.Uint8, config.unused_shared)
        if const_expr(config.loaded_rows < config.tile_rows or config.spread):
            for axis, place in self.stagings.items():
                for address in staged[axis]:
                    self.clear_scales(place, address)

        to = {axis: [(each, outputs[axis][0]) for each in staged[axis]] for axis in config.axes}
        loading = sources, atoms, views, tiles, barrier, rows, column
        if const_expr(config.grouped):
            if rows.start < rows.stop:
                self.quantize(loading, parts, to, maxima, table, global_scale)
        else:
            self.quantize(loading, parts, to, maxima, table, global_scale)
        cute.arch.sync_threads()
        self.write_scales(parts, staged, outputs, rows, (m, k * len(parts)), offsets)

    @cute.jit
    def quantize(self, loading, parts, outputs, maxima, table, global_scale):
        """Load a tile and quantize its ``parts``; ``outputs`` has, for each axis and part, a
        scale's address in shared memory and data in global memory.
        """
        config, encoder = self.config, self.encoder
        sources, _, _, tiles, barrier, rows, _ = loading
        thread = cute.arch.thread_idx()[0]
        self.tiles.start(*loading)
        encode_scale = None
        if const_expr(encoder.has_table):
            value = global_scale[0]
            encode_scale = encoder.encode_scale(value)
            if thread < 128:
                entry = encoder.table_entry(Uint32(thread), value)
                ptx.store_shared(table + thread * 4, [entry], 4)
            cute.arch.sync_threads()
        self.tiles.wait(barrier)
        if const_expr(config.grouped):  # what was not loaded, and what is another expert's
            self.tiles.clear(tiles, rows.stop - rows.start)
        if const_expr(self.packed is not None):
            self.tiles.produce(tiles)
        if const_expr(self.rows is not None and not self.columns):
            self.rows(self.tiles, tiles, parts, outputs[-1], rows, encode_scale, table)
        width, made = sources[0].shape[1] * len(parts), False
        for axis, along in self.columns.items():
            row_outputs = outputs.get(-1)
            along(self.tiles, tiles, parts, outputs[axis], row_outputs, maxima, rows, width, made)
            made = True
        if const_expr(self.packed is not None):
            for part, output in zip(parts, outputs[-2], strict=True):
                self.packed(part, output, rows, encode_scale, table)

    # --- scales -----------------------------------------------------------------------------------

    @cute.jit
    def write_scales(self, parts, staged, outputs, rows, shape, offsets):
        """Copy the scales of a tile of a tensor of ``shape`` to global memory."""
        config, (high, size) = self.config, self.format.block
        m, width = shape
        if const_expr(-1 in config.axes):
            start, stop = rows.scale_start // high, cute.ceil_div(m, high)
            if const_expr(config.spread):
                stop = scale_rows(m, offsets.shape[0])
            elif const_expr(config.grouped):
                start, stop = rows.start, rows.stop
            for part, address in zip(parts, staged[-1], strict=True):
                first, extent = (start, part.column // size), (stop, cute.ceil_div(width, size))
                self.copy_scales(self.stagings[-1], address, outputs[-1][1], first, extent)
        if const_expr(-2 in config.axes):
            blocks = cute.ceil_div(m, size)
            if const_expr(config.grouped):
                blocks = rows.block + cute.ceil_div(rows.scale_stop - rows.start, size)
            for part, address in zip(parts, staged[-2], strict=True):
                first = part.column // high, rows.block
                extent = cute.ceil_div(width, high), blocks
                self.copy_scales(self.stagings[-2], address, outputs[-2][1], first, extent)
                if const_expr(config.grouped):
                    self.clear_unused(outputs[-2][1], part.column, width, rows.unused)

    def allocate(self, memory, nbytes):
        return memory.allocate_array(cutlass.Uint8, nbytes, byte_alignment=16).toint()

    @cute.jit
    def clear_scales(self, place, staged):
        """Set a tile's scales in shared memory to zero."""
        thread = cute.arch.thread_idx()[0]
        for i in range_constexpr(cute.ceil_div(place.nbytes, 4 * self.config.threads)):
            position = (i * self.config.threads + thread) * 4
            if position < place.nbytes:
                ptx.store_shared(staged + position, [Uint32(0)], 4)

    @cute.jit
    def clear_unused(self, scale, column, width, unused):
        """Set compact scales along columns to zero in blocks that belong to no row."""
        place, thread = self.stagings[-2], cute.arch.thread_idx()[0]
        pieces = place.line_bytes // place.vector
        for i in range_constexpr(2):
            first, stop = unused[i]
            for index in range(thread, (stop - first) * pieces, self.config.threads):
                within = index % pieces * place.vector
                offset, valid = place.line(index // pieces, (column, first), (width, stop))
                if within < valid:
                    zero = [Uint32(0)] * max(place.vector // 4, 1)
                    target = scale.iterator.toint() + offset + within
                    ptx.store_global(target, zero, place.vector)

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


def fake_sources(config: Config) -> tuple:
    """Sources of any shape, as the compiler needs them."""
    align = 16 if config.tma else config.dtype.itemsize
    return tuple(
        any_tensor(NUMERIC[config.dtype], 2, align, config.tma)
        for _ in range(PRODUCERS[config.producer].sources)
    )


def compile_config(config: Config):
    """The host function of a kernel, which takes tensors of any shape."""
    quantizer, outputs = Quantizer(config), []
    for axis in (-1, -2):
        if axis not in config.axes:
            outputs += [None, None]
            continue
        layout = config.layouts[config.axes.index(axis)]
        scale = _SCALES[4 if config.spec.scale_nan > 0xFF else 1]
        scale = cutlass.Int32 if layout == "packed" else scale
        outputs += [
            any_tensor(cutlass.Uint8, 2, 16),
            any_tensor(scale, 1 + (layout in _MATRICES), 16),
        ]
    return cute.compile(
        quantizer,
        fake_sources(config),
        *outputs,
        any_tensor(cutlass.Float32, 1, 4) if quantizer.encoder.has_table else None,
        any_tensor(Int32, 1, 4) if config.grouped else None,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {config.arch}",
    )
