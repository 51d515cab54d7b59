# mypy: ignore-errors
"""The quantizer: one read of a tile, its blocks along rows, along columns, or both.

A CTA loads a tile (``tile``) and quantizes it along rows (``rows``), columns
(``columns``) or both. Scales go through shared memory (``scales``): whoever has one puts it down,
and after a barrier all threads copy them out.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from ...dtypes import FLOAT32
from ...formats import GROUP_TILE, get_format, padded_groups
from ...rounding import LARGEST
from ..common import ptx
from ..common.encode import Encoder
from ..common.pdl import pdl_wait
from ..common.shared import allocate, clear
from ..common.tensor_specs import HostFunction, any_outputs, any_source, any_tensor
from .columns import Columns, Target
from .config import PRODUCERS, Config
from .groups import TileRows, find_rows, scale_rows, tile_count
from .noise import Noise
from .packed import PackedColumns
from .pieces import Pieces
from .rows import Rows
from .scales import staging
from .squares import Squares
from .tile import Loaded, Loading, Tiles
from .transform import Transform

__all__ = ["Quantizer", "any_signs", "encoder_of", "fake_sources", "host_function"]

_DEEP = 1 << 15  # tiles down the rows in one layer of the grid


class Quantizer:
    """The kernel of a :class:`Config` and the host code that launches it."""

    def __init__(self, config: Config):
        self.config = config
        self.format = get_format(config.format)
        self.tiles = Tiles(config)
        self.encoder = encoder_of(config)
        rows, columns, size = config.tile_rows, config.tile_columns, self.format.block_size
        high = self.format.block[0]  # across the contraction
        extent = {-1: (rows // high, columns // size), -2: (columns // high, rows // size)}
        self.stagings = {
            axis: staging(layout, axis, *extent[axis], self.format.scale.nbytes, store)
            for axis, layout, store in zip(
                config.axes, config.layouts, config.scale_stores, strict=True
            )
        }
        self.pieces = pieces = Pieces(config) if config.turned else None
        self.rows = self.packed = None
        self.columns = {}
        for axis, place in self.stagings.items():
            if axis == -1 and high == 1:
                self.rows = Rows(config, self.encoder, size, place)
            elif config.spec.bits < 8:
                self.packed = PackedColumns(config, self.encoder, size, place, pieces)
            else:
                block, turned = self.format.block, pieces if axis == -2 else None
                self.columns[axis] = Columns(config, self.encoder, block, place, self.rows, turned)

    @cute.jit
    def __call__(self, sources, outputs, global_scale, offsets, of_rows, applied, stream):
        """Launch. ``sources`` (M, K) each. ``outputs``: data (rows, bytes) and scales in any shape
        along rows, then along columns, data there (columns, bytes) if turned; None for an axis that
        is not asked for. Or None, too: ``global_scale`` () fp32, ``offsets`` (groups,) int32, and
        ``of_rows``: (rows,) int32 to gather, weights (M,) fp32, and for their gradients partial
        sums (columns / 64, M) fp32; and ``applied``: what ``further.Further`` has.
        """
        config = self.config
        atoms, views = self.tiles.descriptors(sources)
        rows, columns = sources[0].shape[-2:]
        if const_expr(config.gather):
            rows = _of_rows(config, of_rows)[0].shape[0]
        down = cute.ceil_div(rows, config.tile_rows)
        if const_expr(config.batched):
            down = down * sources[0].shape[0]
        if const_expr(config.grouped):
            down = tile_count(rows, offsets.shape[0])
        outputs = {-1: outputs[:2], -2: outputs[2:]}
        self.kernel(atoms, views, sources, outputs, global_scale, offsets, of_rows, applied).launch(
            grid=(
                cute.ceil_div(columns, config.tile_columns),
                cutlass.min(down, _DEEP),
                cute.ceil_div(down, _DEEP),
            ),
            block=(config.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, atoms, views, sources, outputs, global_scale, offsets, of_rows, applied):
        config = self.config
        pdl_wait()
        across, down, layer = cute.arch.block_idx()
        down = layer * _DEEP + down
        indices, weights, sums = _of_rows(config, of_rows)
        matrix = None
        if const_expr(config.batched):
            tiles = cute.ceil_div(sources[0].shape[1], config.tile_rows)
            matrix, down = down // tiles, down % tiles
            sources = [x[(matrix, None, None)] for x in sources]
            outputs = {
                axis: [None if x is None else x[(matrix, None, None)] for x in each]
                for axis, each in outputs.items()
            }
        m, k = sources[0].shape
        if const_expr(config.gather):
            m = indices.shape[0]
        row, column = down * config.tile_rows, across * config.tile_columns
        if const_expr(config.grouped):
            rows = find_rows(down, offsets, m)
        else:
            rows = TileRows(row, m, m, row, row)

        memory = cutlass.memory.SmemAllocator()
        tiles, barrier = self.tiles.allocate(memory)
        parts = self.tiles.parts(sources, tiles, column)
        staged = {
            axis: [allocate(memory, place.nbytes) for _ in parts]
            for axis, place in self.stagings.items()
        }
        maxima = table = None
        for along in list(self.columns.values())[:1]:
            maxima = along.allocate(memory)
        if const_expr(self.encoder.has_table):
            table = allocate(memory, 128 * 4)
        if const_expr(config.square):
            squares = Squares.of(config, self.encoder, self.format.block_size, memory)
            rows = replace(rows, applied=replace(rows.applied, squares=squares))
        if const_expr(config.unused_shared):
            memory.allocate_array(cutlass.Uint8, config.unused_shared)
        if const_expr(config.loaded_rows < config.tile_rows or config.spread):
            for axis, place in self.stagings.items():
                for address in staged[axis]:
                    clear(address, place.nbytes, config.threads)

        to = {axis: [(each, outputs[axis][0]) for each in staged[axis]] for axis in config.axes}
        loading = Loading(sources, atoms, views, barrier, indices, matrix)
        loaded = Loaded(tiles, rows, column, k, weights, sums)
        if const_expr(config.grouped):
            if rows.start < rows.stop:
                self.quantize(loading, loaded, parts, to, maxima, table, global_scale, applied)
        else:
            self.quantize(loading, loaded, parts, to, maxima, table, global_scale, applied)
        cute.arch.sync_threads()
        self.write_scales(parts, staged, outputs, rows, (m, k * len(parts)), offsets)
        if const_expr(config.grouped and config.turned):
            for part in parts:
                for first, stop in rows.unused:
                    for tile in range(first, stop):
                        self.pieces.copy(part, outputs[-2][0], tile * GROUP_TILE, made=False)

    def apply(self, given, matrix, rows) -> TileRows:
        """Rows of a matrix, with what is applied to their elements."""
        config, given = self.config, list(given or ())
        noise = Noise.of(given[:5], matrix, config.fours) if config.stochastic else None
        of = "scale_noise" if config.scaling == "ms_eden" else "noise"
        transform = Transform.of(config, given[-2:]) if config.hadamard else None
        return replace(rows, applied=replace(rows.applied, transform=transform, **{of: noise}))

    @cute.jit
    def quantize(self, loading, loaded, parts, outputs, maxima, table, global_scale, applied):
        """Load a tile and quantize its ``parts``; ``outputs`` has, for each axis and part, a
        scale's address in shared memory and data in global memory.
        """
        config, encoder = self.config, self.encoder
        self.tiles.start(loading, loaded)
        rows = self.apply(applied, loading.matrix, loaded.rows)  # signs are drawn meanwhile
        encode_scale = None
        if const_expr(encoder.has_table):
            encode_scale = encoder.prepare(global_scale, table, config.threads)
            cute.arch.sync_threads()
        self.tiles.wait(loading.barrier)
        if const_expr(config.grouped):  # what was not loaded, and what is another expert's
            self.tiles.clear(loaded.tiles, rows.stop - rows.start)
        if const_expr(rows.applied.squares is not None):
            rows.applied.squares.find(parts[0].address, encode_scale, table)
        made = self.packed is not None
        if const_expr(made):
            self.tiles.produce(loaded)
        if const_expr(self.rows is not None and not self.columns):
            self.rows(self.tiles, loaded, parts, outputs[-1], rows, encode_scale, table, made)
        width = loading.sources[0].shape[1] * len(parts)
        for axis, along in self.columns.items():
            row_outputs = outputs.get(-1, [None] * len(parts))
            targets = [Target(*pair) for pair in zip(outputs[axis], row_outputs, strict=True)]
            along(self.tiles, loaded, parts, targets, maxima, rows, width, made)
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
            count = None
            together = config.grouped and not config.spread and config.layouts[0] != "compact"
            if const_expr(together):  # rows lie side by side, those of other experts beside them
                stop, count = m, rows.stop - rows.start
            place, scale = self.stagings[-1], outputs[-1][1]
            for part, address in zip(parts, staged[-1], strict=True):
                first, extent = (start, part.column // size), (stop, cute.ceil_div(width, size))
                place.copy(address, scale, first, extent, config.threads, count)
                if const_expr(together):
                    place.clear_padding(scale, first, extent, rows.start < m and rows.stop == m)
        if const_expr(-2 in config.axes):
            stored = m
            if const_expr(config.grouped):
                stored = padded_groups(m, offsets.shape[0])
            extent = cute.ceil_div(width, high), cute.ceil_div(stored, size)
            for part, address in zip(parts, staged[-2], strict=True):
                first = part.column // high, rows.apart // size
                self.stagings[-2].copy(address, outputs[-2][1], first, extent, config.threads)
                if const_expr(config.grouped):
                    self.clear_unused(outputs[-2][1], part.column, extent, rows.unused)

    @cute.jit
    def clear_unused(self, scale, column, extent, unused):
        """Set scales along columns to zero in tiles that belong to no row."""
        place, thread = self.stagings[-2], cute.arch.thread_idx()[0]
        pieces = place.line_bytes // place.vector
        for i in range_constexpr(2):
            first, stop = unused[i]
            for index in range(thread, (stop - first) * place.lines * pieces, self.config.threads):
                line, within = index // pieces, index % pieces * place.vector
                block = (first + line // place.lines) * place.blocks
                offset, valid = place.line(line % place.lines, (column, block), extent)
                if within < valid:
                    zero = [Uint32(0)] * max(place.vector // 4, 1)
                    target = scale.iterator.toint() + offset + within
                    ptx.store_global(target, zero, place.vector)


def encoder_of(config: Config) -> Encoder:
    """What is transformed is fp32 then."""
    encoder = replace(Encoder.of(config), largest=LARGEST.get(config.scaling, ()))
    return replace(encoder, dtype=FLOAT32) if config.hadamard else encoder


def fake_sources(config: Config) -> tuple:
    """Sources of any shape, as the compiler needs them."""
    count = PRODUCERS[config.producer].sources
    return tuple(any_source(config.dtype, config.aligned, config.batched) for _ in range(count))


def _any_of_rows(config: Config) -> tuple | None:
    """What the kernel takes of rows: a tuple of those that there are, or None."""
    producer = PRODUCERS[config.producer]
    kinds = [(Int32, 1)] * config.gather + [(Float32, 1)] * producer.weighted
    kinds += [(Float32, 2)] * (producer.weighted and producer.parts > 1)
    return tuple(any_tensor(kind, rank, 4) for kind, rank in kinds) or None


def _of_rows(config: Config, given: tuple | None) -> list:
    """Indices, weights and partial sums of what ``_any_of_rows`` has; None for those it has not."""
    given = list(given or ())
    indices = given.pop(0) if config.gather else None
    return [indices, *given, None, None][:3]


def _any_applied(config: Config) -> tuple | None:
    """What ``further.Further`` gives a kernel, or None."""
    numbers = [any_tensor(Int64, 0, 8), *[Int64(0)] * 4] if config.stochastic else []
    return (*numbers, *any_signs(config)) or None


def any_signs(config: Config) -> tuple:
    """What ``further.Further`` gives a kernel of signs."""
    if not config.hadamard:
        return ()
    return (any_tensor(Int64, 0, 8) if config.draws_signs else Int64(0)), Int64(0)


def host_function(config: Config):
    """The host function of a kernel, which takes tensors of any shape."""
    quantizer, outputs = Quantizer(config), []
    for axis in (-1, -2):
        if axis in config.axes:
            layout = config.layouts[config.axes.index(axis)]
            outputs += any_outputs(quantizer.format, layout, config.batched)
        else:
            outputs += [None, None]
    return HostFunction(
        config.arch,
        quantizer,
        fake_sources(config),
        tuple(outputs),
        any_tensor(Float32, 0, 4) if quantizer.encoder.has_table else None,
        any_tensor(Int32, 1, 4) if config.grouped else None,
        _any_of_rows(config),
        _any_applied(config),
    )
