# mypy: ignore-errors
"""The statistics of rows that a norm divides by, and its weight and bias in fp32.

Rows come into shared memory and are summed up as :class:`RmsNorm` does it. What is written lies as
:class:`Places` says, for producers of the quantizer behind.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int64, Uint32, const_expr, cute, range_constexpr, select_

from ...rounding import FP32_INF, FP32_NAN
from ..common import ptx
from ..common.arithmetic import add, element, multiply, widen
from ..common.numeric import NUMERIC
from ..common.pdl import pdl_wait
from ..common.shared import allocate
from ..common.tensor_specs import any_source, any_tensor, compile_for
from .norm_config import SEGMENT
from .rmsnorm_kernel import RmsNorm
from .statistics_config import Places, StatisticsConfig
from .tile import ELEMENTS

__all__ = ["Statistics", "compile_config"]


class Statistics(RmsNorm):
    """The kernel of a :class:`StatisticsConfig` and the host code that launches it."""

    def __init__(self, config: StatisticsConfig):
        self.config = config
        self.blackwell = config.arch.startswith("sm_10")
        self.row_bytes = config.segments * SEGMENT * config.dtype.itemsize

    @cute.jit
    def __call__(self, x, weight, bias, written, eps: Float32, stream):
        """Launch. ``x`` (M, K), ``weight`` and ``bias`` (K,), or None; ``written``: fp32, as
        ``Places`` of (M, K) has it."""
        self.kernel(x, weight, bias, written, eps).launch(
            grid=(cute.ceil_div(x.shape[0], self.config.tile_rows), 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, x, weight, bias, written, eps: Float32):
        config, rows = self.config, self.config.tile_rows
        pdl_wait()
        first = cute.arch.block_idx()[0] * rows
        places, base = Places.of(x.shape[0], config.columns), written.iterator.toint()
        memory = cutlass.memory.SmemAllocator()
        tile = allocate(memory, rows * self.row_bytes, 128)
        sums = allocate(memory, config.segments * rows * 4)
        means = allocate(memory, rows * 4)
        barrier = memory.allocate_array(cutlass.Int64, 1)
        if const_expr(config.bulk):
            self.start_load(x, tile, barrier, first)
        else:
            self.load(x, tile, first)
        self.copy(weight, config.weight_dtype, base, places.weight)
        if const_expr(bias is not None):
            self.copy(bias, config.bias_dtype, base, places.bias)
        if const_expr(config.bulk):
            cute.arch.mbarrier_wait(barrier, 0)
        else:
            cute.arch.sync_threads()
        thread = cute.arch.thread_idx()[0]
        if const_expr(config.centered):
            self.add_up(tile, sums, means, False)
            cute.arch.sync_threads()
            if thread < rows:
                self.finish_mean(sums, means, base, places.mean, (first + thread, x.shape[0]))
            cute.arch.sync_threads()
        self.add_up(tile, sums, means, True)
        cute.arch.sync_threads()
        if thread < rows:
            self.finish_rstd(sums, base, places.rstd, (first + thread, x.shape[0]), eps)

    @cute.jit
    def copy(self, source, dtype: cutlass.Constexpr, base, place):
        """Numbers of all columns in fp32, and zeros up to a multiple of 16, by all CTAs."""
        config, size = self.config, dtype.itemsize
        step = cute.arch.grid_dim()[0] * config.threads
        first = cute.arch.block_idx()[0] * config.threads + cute.arch.thread_idx()[0]
        for i in range(first, -(-config.columns // ELEMENTS) * ELEMENTS, step):
            inside = cutlass.min(i, config.columns - 1)
            word = ptx.load_global(source.iterator.toint() + Int64(inside) * size, size)
            value = element(word, 0, dtype).bitcast(Uint32)
            value = Uint32(select_(i < config.columns, value, Uint32(0)))
            ptx.store_global(base + (Int64(place) + i) * 4, [value], 4)

    @cute.jit
    def add_up(self, tile, sums, means, squares: cutlass.Constexpr):
        """Sums of a block's rows, or of squares, of what is over their means if they have some."""
        config = self.config
        warp = cute.arch.thread_idx()[0] // 32
        across, down = warp % config.segment_warps, warp // config.segment_warps
        for i in range_constexpr(-(-config.segments // config.segment_warps)):
            segment = across + i * config.segment_warps
            if segment < config.segments:
                self.add_segment(tile, sums, means, (segment, down), squares)

    @cute.jit
    def add_segment(self, tile, sums, means, place, squares: cutlass.Constexpr):
        """Those of a segment of each of a warp's rows."""
        config, (segment, down) = self.config, place
        lane = cute.arch.lane_idx()
        count = config.tile_rows // config.row_warps
        together = min(count, 4)
        for i in range(count // together):
            found = []
            for j in range_constexpr(together):
                row = down * count + i * together + j
                values = widen(self.elements(tile, row, segment), config.dtype)
                if const_expr(squares and config.centered):
                    minus = ptx.multiply(ptx.load_float(means + row * 4), Float32(-1.0))
                    values = self.over(values, minus, segment * SEGMENT + lane * ELEMENTS)
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

    def over(self, values: list, minus, column) -> list:
        """Values from ``column`` on without their mean; zeros past the last column."""
        values = add(values, [minus] * ELEMENTS, self.blackwell)
        if self.config.columns % SEGMENT == 0:
            return values
        inside = [column + i < self.config.columns for i in range(ELEMENTS)]
        pairs = zip(values, inside, strict=True)
        return [Float32(select_(known, value, Float32(0.0))) for value, known in pairs]

    @cute.jit
    def finish_mean(self, sums, means, base, place, row):
        """The mean of a thread's row, a slot of the block, and where it is kept."""
        value = self.canonical(self.mean(sums))
        ptx.store_shared(means + cute.arch.thread_idx()[0] * 4, [value], 4)
        self.put(value, base, place, row)

    @cute.jit
    def finish_rstd(self, sums, base, place, row, eps):
        """1 / sqrt(mean + eps) of a thread's row."""
        root = ptx.square_root(ptx.add(self.mean(sums), eps))
        self.put(self.canonical(ptx.divide(Float32(1.0), root)), base, place, row)

    def mean(self, sums):
        """Of a thread's row, from sums of its segments."""
        config = self.config
        where = sums + cute.arch.thread_idx()[0] * 4
        parts = [ptx.load_float(where + i * config.tile_rows * 4) for i in range(config.segments)]
        while len(parts) > 1:  # zeros that would fill up the tree change no sum
            pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
            parts = [ptx.add(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
        return ptx.divide(parts[0], Float32(config.columns))

    def canonical(self, value):
        """Bits of a number, with one NaN."""
        bits = value.bitcast(Uint32)
        return Uint32(select_(bits & 0x7FFFFFFF > Uint32(FP32_INF), Uint32(FP32_NAN), bits))

    @cute.jit
    def put(self, value, base, place, row):
        row, rows = row
        if row < rows:
            ptx.store_global(base + (Int64(place) + row) * 4, [value], 4)


def compile_config(config: StatisticsConfig):
    """The host function of a kernel, which takes any number of rows."""
    weight, bias = config.weight_dtype, config.bias_dtype
    return compile_for(
        config.arch,
        Statistics(config),
        any_source(config.dtype, config.bulk),
        any_tensor(NUMERIC[weight], 1, weight.itemsize),
        None if bias is None else any_tensor(NUMERIC[bias], 1, bias.itemsize),
        any_tensor(Float32, 1, 4),
        Float32(0.0),
    )
