# mypy: ignore-errors
"""RMSNorm of rows and their quantization, from one read.

A CTA holds whole rows in shared memory, each loaded by one bulk copy, all waited on
once. A warp takes a "segment", 512 columns of a row, 16 elements a lane, first for the sum of
squares, and, when the block's rows are summed up, to normalize, round and quantize it.

Sums are those of a balanced binary tree over the columns: 16 elements in a lane, lanes 1, 2, 4, 8
and 16 apart, then segments. No product is fused with a sum: every result is rounded, in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr, select_

from ...formats import get_format
from ...rounding import FP32_INF, FP32_NAN
from ..common import ptx
from ..common.arithmetic import add, multiply, narrow, widen
from ..common.encode import Encoder
from ..common.numeric import NUMERIC
from ..common.pdl import pdl_wait
from ..common.shared import allocate, clear
from ..common.tensor_specs import HostFunction, any_outputs, any_source, any_tensor
from .groups import TileRows
from .norm_config import SEGMENT, NormConfig
from .rows import Rows
from .scales import Packed, staging
from .tile import ELEMENTS, Part, load_words

__all__ = ["RmsNorm", "host_function", "one_nan"]

_TILE = 128  # rows of a tile of the tcgen05 layout


@dataclass(frozen=True)
class _Interleaved(Packed):
    """tcgen05 tiles of rows in the order of ``RmsNorm.row``: a line is four blocks of each."""

    def line(self, line, start, shape):
        tiles = (shape[1] + 3) >> 2
        offset = (Int64(start[0] // _TILE) * tiles + line) * (_TILE * 4) + start[0] % _TILE * 4
        return offset, Int32(select_(line < tiles, Int32(self.line_bytes), Int32(0)))


@dataclass(frozen=True)
class _Shared:
    """Addresses in shared memory.

    Attributes:
        tile: the rows.
        scales: block scales of all rows, before they are copied out.
        sums: of squares, for each segment and row.
        inverses: ``rstd`` of each row.
        barrier: the mbarrier of the load.
        table: reciprocals of block scales, where there is a global one.
    """

    tile: Any
    scales: Any
    sums: Any
    inverses: Any
    barrier: Any
    table: Any


class RmsNorm:
    """The kernel of a :class:`NormConfig` and the host code that launches it."""

    def __init__(self, config: NormConfig):
        self.config = config
        self.format = get_format(config.format)
        self.blackwell = config.arch.startswith("sm_10")
        self.encoder = Encoder.of(config)
        size, rows = self.format.scale.nbytes, config.tile_rows
        line = math.ceil(config.columns / self.format.block_size) if self.is_compact else rows * 4
        line *= size if self.is_compact else 1
        blocks = config.segments * SEGMENT // self.format.block_size
        extent = rows, blocks, size, math.gcd(line, 16)
        if config.layout == "tcgen05":
            self.place = _Interleaved(*extent)
        else:
            self.place = staging(config.layout, -1, *extent)
        self.rows = Rows(config, self.encoder, self.format.block_size, self.place)
        self.row_bytes = config.segments * SEGMENT * config.dtype.itemsize

    @property
    def is_compact(self) -> bool:
        return self.config.layout == "compact"

    @cute.jit
    def __call__(self, x, weight, data, scale, rstd, eps: Float32, global_scale, stream):
        """Launch. ``x`` (M, K), ``weight`` (K,), ``data`` (M, bytes), ``scale`` in any shape,
        ``rstd`` (M,) fp32, ``global_scale`` () fp32 or None.
        """
        config = self.config
        multiple = config.row_multiple
        rows = (x.shape[0] + multiple - 1) // multiple * multiple
        self.kernel(x, weight, data, scale, rstd, eps, global_scale).launch(
            grid=(cute.ceil_div(rows, config.tile_rows), 1, 1),
            block=(config.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, x, weight, data, scale, rstd, eps: Float32, global_scale):
        config, encoder, rows = self.config, self.encoder, self.config.tile_rows
        pdl_wait()
        first = cute.arch.block_idx()[0] * rows

        memory = cutlass.memory.SmemAllocator()
        tile = allocate(memory, rows * self.row_bytes, 128)
        staged = allocate(memory, self.place.nbytes)
        sums = allocate(memory, config.segments * rows * 4)
        inverses = allocate(memory, rows * 4)
        barrier = memory.allocate_array(cutlass.Int64, 1)
        table = None
        if const_expr(encoder.has_table):
            table = allocate(memory, 128 * 4)
        if self.row(first) < x.shape[0]:
            shared = _Shared(tile, staged, sums, inverses, barrier, table)
            self.normalize(x, weight, data, rstd, eps, global_scale, first, shared)
        else:  # rows of padding
            clear(staged, self.place.nbytes, config.threads)
        cute.arch.sync_threads()
        shape = x.shape[0], math.ceil(config.columns / self.format.block_size)
        self.place.copy(staged, scale, (first, 0), shape, config.threads)

    @cute.jit
    def normalize(self, x, weight, data, rstd, eps, global_scale, first, shared: _Shared):
        """Normalize and quantize the rows from slot ``first`` on; their scales stay in shared
        memory."""
        config, encoder = self.config, self.encoder
        tile, sums, inverses, barrier = shared.tile, shared.sums, shared.inverses, shared.barrier
        thread = cute.arch.thread_idx()[0]
        if const_expr(config.bulk):
            self.start_load(x, tile, barrier, first)
        else:
            self.load(x, tile, first)
        encode_scale = None
        if const_expr(encoder.has_table):
            encode_scale = encoder.prepare(global_scale, shared.table, config.threads)
        warp = thread // 32
        across, down = warp % config.segment_warps, warp // config.segment_warps
        words = self.weights(weight, across)
        if const_expr(config.bulk):
            cute.arch.mbarrier_wait(barrier, 0)
        else:
            cute.arch.sync_threads()

        passes = -(-config.segments // config.segment_warps)
        for i in range_constexpr(passes):
            segment = across + i * config.segment_warps
            if segment < config.segments:
                self.add_up(tile, sums, (segment, down))
        cute.arch.sync_threads()
        if thread < config.tile_rows:
            self.finish(sums, inverses, rstd, eps, first + thread)
        cute.arch.sync_threads()
        for i in range_constexpr(passes):
            segment = across + i * config.segment_warps
            factors, words = widen(words, config.weight_dtype), None
            if const_expr(i + 1 < passes):  # while this one is at work
                words = self.weights(weight, segment + config.segment_warps)
            if segment < config.segments:
                place = segment, down, first
                self.quantize(shared, data, factors, place, x.shape[0], encode_scale)

    def row(self, slot):
        """The row that is number ``slot`` in the order of CTAs.

        In tcgen05 tiles rows 32 apart lie together: with such an order a block's scales do, too.
        """
        if self.config.layout != "tcgen05":
            return slot
        return (slot & -_TILE) + ((slot & 3) << 5) + ((slot & (_TILE - 1)) >> 2)

    # --- loads ------------------------------------------------------------------------------------

    @cute.jit
    def start_load(self, x, tile, barrier, first):
        """Load rows from ``first`` on, the last row for those past it: the barrier's first phase
        ends when all are there. Columns past the last one are set to zero.
        """
        config = self.config
        thread = cute.arch.thread_idx()[0]
        size = config.dtype.itemsize
        if thread == 0:
            cute.arch.mbarrier_init(barrier, config.tile_rows)
            cute.arch.mbarrier_init_fence()
        used = config.columns * size
        unused = (self.row_bytes - used) // 16
        for i in range(thread, config.tile_rows * unused, config.threads):
            where = tile + i // unused * self.row_bytes + used + i % unused * 16
            ptx.store_shared(where, [Uint32(0)] * 4, 16)
        cute.arch.sync_threads()
        if thread < config.tile_rows:
            row = cutlass.min(self.row(first + thread), x.shape[0] - 1)
            source = x.iterator.toint() + Int64(row) * x.stride[0] * size
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, used)
            ptx.copy_bulk(tile + thread * self.row_bytes, source, used, barrier.toint())

    @cute.jit
    def load(self, x, tile, first):
        """As ``start_load``, an element at a time: for addresses that bulk copies cannot take."""
        config, size = self.config, self.config.dtype.itemsize
        pitch = config.segments * SEGMENT
        for i in range(cute.arch.thread_idx()[0], config.tile_rows * pitch, config.threads):
            row = cutlass.min(self.row(first + i // pitch), x.shape[0] - 1)
            column = i % pitch
            value = Uint32(0)
            if column < config.columns:
                source = x.iterator.toint() + (Int64(row) * x.stride[0] + column) * size
                value = ptx.load_global(source, size)
            ptx.store_shared(tile + i * size, [value], size)

    @cute.jit
    def weights(self, weight, segment):
        """Words of a lane's 16 weights; of any where there are none."""
        config, size = self.config, self.config.weight_dtype.itemsize
        column = segment * SEGMENT + cute.arch.lane_idx() * ELEMENTS
        base = weight.iterator.toint()
        if const_expr(config.wide_weight):
            start = base + cutlass.min(column, config.columns - ELEMENTS) * size
            return [w for i in range(0, ELEMENTS * size, 16) for w in ptx.load_words(start + i)]
        values = [
            ptx.load_global(base + cutlass.min(column + i, config.columns - 1) * size, size)
            for i in range(ELEMENTS)
        ]
        if const_expr(size == 4):
            return values
        return [a | (b << 16) for a, b in zip(values[0::2], values[1::2], strict=True)]

    # --- the norm ---------------------------------------------------------------------------------

    @cute.jit
    def add_up(self, tile, sums, place, means=None, squares: cutlass.Constexpr = True):
        """Sums of squares, or of elements, of a segment in each of a warp's rows, whose ``means``
        are taken away first, if there are some. ``place``: the segment, and the warp's place down
        the tile."""
        config, (segment, down) = self.config, place
        lane = cute.arch.lane_idx()
        count = config.tile_rows // config.row_warps
        together = min(count, 4)
        for i in range(count // together):
            found = []
            for j in range_constexpr(together):
                row = down * count + i * together + j
                values = widen(self.elements(tile, row, segment), config.dtype)
                if const_expr(means is not None):
                    minus = ptx.multiply(ptx.load_float(means + row * 4), Float32(-1.0))
                    values = self.centered(values, minus, segment * SEGMENT + lane * ELEMENTS)
                # Bit-reversed, so that a sum of neighbours is one of the first and second half.
                values = [values[int(f"{n:04b}"[::-1], 2)] for n in range(ELEMENTS)]
                found.append(multiply(values, values, self.blackwell) if squares else values)
            while const_expr(len(found[0]) > 1):
                halves = [(v[: len(v) // 2], v[len(v) // 2 :]) for v in found]
                found = [add(*each, self.blackwell) for each in halves]
            totals = [v[0] for v in found]
            for j in range_constexpr(5):
                others = [cute.arch.shuffle_sync_bfly(total, 1 << j) for total in totals]
                totals = [ptx.add(a, b) for a, b in zip(totals, others, strict=True)]
            if lane == 0:
                where = sums + (segment * config.tile_rows + down * count + i * together) * 4
                ptx.store_shared(where, [t.bitcast(Uint32) for t in totals], 4 * together)

    def centered(self, values: list, minus, column) -> list:
        """Values from ``column`` on less their mean; zeros past the last column."""
        values = add(values, [minus] * ELEMENTS, self.blackwell)
        if self.config.columns % SEGMENT == 0:
            return values
        inside = [column + i < self.config.columns for i in range(ELEMENTS)]
        pairs = zip(values, inside, strict=True)
        return [Float32(select_(known, value, Float32(0.0))) for value, known in pairs]

    def mean(self, sums):
        """Of what was summed up of a thread's row."""
        config = self.config
        where = sums + cute.arch.thread_idx()[0] * 4
        parts = [ptx.load_float(where + i * config.tile_rows * 4) for i in range(config.segments)]
        while len(parts) > 1:  # zeros that would fill up the tree change no sum
            pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
            parts = [ptx.add(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
        return ptx.divide(parts[0], Float32(config.columns))

    def inverse(self, sums, eps):
        """1 / sqrt(mean + eps) of a thread's row."""
        root = ptx.square_root(ptx.add(self.mean(sums), eps))
        return one_nan(ptx.divide(Float32(1.0), root))

    @cute.jit
    def finish(self, sums, inverses, rstd, eps, slot):
        """The inverse of a thread's row, for all threads and for the caller."""
        inverse = self.inverse(sums, eps)
        ptx.store_shared(inverses + cute.arch.thread_idx()[0] * 4, [inverse], 4)
        row = self.row(slot)
        if row < rstd.shape[0]:
            ptx.store_global(rstd.iterator.toint() + Int64(row) * 4, [inverse], 4)

    # --- quantization -----------------------------------------------------------------------------

    @cute.jit
    def quantize(self, shared: _Shared, data, factors, place, rows, encode_scale):
        """Normalize and quantize a segment of each of a warp's rows. ``place``: the segment, the
        warp's place down the tile, and the tile's first slot."""
        config, (segment, down, first) = self.config, place
        column = segment * SEGMENT + cute.arch.lane_idx() * ELEMENTS
        count = config.tile_rows // config.row_warps
        for i in range(count):
            slot = down * count + i
            inverse = [ptx.load_float(shared.inverses + slot * 4)] * ELEMENTS
            values = widen(self.elements(shared.tile, slot, segment), config.dtype)
            values = multiply(values, inverse, self.blackwell)
            words = narrow(multiply(values, factors, self.blackwell), config.dtype)
            if const_expr(config.columns % SEGMENT):
                words = self.inside(words, column)
            which = TileRows(self.row(first + slot) - slot, rows, rows, None, None)
            part, where, output = Part(shared.tile, 0, None), (slot, column), (shared.scales, data)
            self.rows.strip(part, words, where, output, which, encode_scale, shared.table)

    def inside(self, words: list, column) -> list:
        """Zeros for what lies past the last column of 16 elements from ``column`` on."""
        columns, each = self.config.columns, self.encoder.per_word
        if columns % each == 0:
            return [ptx.below(w, column + i * each, columns) for i, w in enumerate(words)]
        halves = [
            [ptx.below(w & Uint32(0xFFFF << 16 * j), column + i * 2 + j, columns) for j in range(2)]
            for i, w in enumerate(words)
        ]
        return [low | high for low, high in halves]

    # --- elements ---------------------------------------------------------------------------------

    def elements(self, tile, slot, segment) -> list:
        """Words of a lane's 16 elements."""
        size = self.config.dtype.itemsize
        column = segment * SEGMENT + cute.arch.lane_idx() * ELEMENTS
        return load_words(tile + slot * self.row_bytes + column * size, size)


def one_nan(value):
    """Bits of a number, which are the same ones of all that is none."""
    bits = value.bitcast(Uint32)
    return Uint32(select_(bits & 0x7FFFFFFF > Uint32(FP32_INF), Uint32(FP32_NAN), bits))


def host_function(config: NormConfig):
    """The host function of a kernel, which takes any number of rows."""
    kernel, weight = RmsNorm(config), config.weight_dtype
    return HostFunction(
        config.arch,
        kernel,
        any_source(config.dtype, config.bulk),
        any_tensor(NUMERIC[weight], 1, 16 if config.wide_weight else weight.itemsize),
        *any_outputs(kernel.format, config.layout),
        any_tensor(Float32, 1, 4),
        Float32(0.0),
        any_tensor(Float32, 0, 4) if kernel.encoder.has_table else None,
    )
