# mypy: ignore-errors
"""The statistics of rows that a norm divides by, and its weight and bias in fp32.

Rows come into shared memory and are summed up as :class:`RmsNorm` does it. What is written lies as
:class:`Places` says, for producers of the quantizer behind.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int64, Uint32, const_expr, cute, range_constexpr, select_

from ..common import ptx
from ..common.arithmetic import element
from ..common.numeric import NUMERIC
from ..common.pdl import pdl_wait
from ..common.shared import allocate
from ..common.tensor_specs import HostFunction, any_source, any_tensor
from .norm_config import SEGMENT
from .rmsnorm_kernel import RmsNorm, one_nan
from .statistics_config import Places, StatisticsConfig
from .tile import ELEMENTS

__all__ = ["Statistics", "host_function"]


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
            self.add_rows(tile, sums, squares=False)
            cute.arch.sync_threads()
            if thread < rows:
                self.finish_mean(sums, means, base, places.mean, (first + thread, x.shape[0]))
            cute.arch.sync_threads()
        self.add_rows(tile, sums, means if config.centered else None)
        cute.arch.sync_threads()
        if thread < rows:
            inverse = self.inverse(sums, eps)
            self.put(inverse, base, places.rstd, (first + thread, x.shape[0]))

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
    def add_rows(self, tile, sums, means=None, squares: cutlass.Constexpr = True):
        """``add_up`` of all segments of a block's rows."""
        config = self.config
        warp = cute.arch.thread_idx()[0] // 32
        across, down = warp % config.segment_warps, warp // config.segment_warps
        for i in range_constexpr(-(-config.segments // config.segment_warps)):
            segment = across + i * config.segment_warps
            if segment < config.segments:
                self.add_up(tile, sums, (segment, down), means, squares)

    @cute.jit
    def finish_mean(self, sums, means, base, place, row):
        """The mean of a thread's row, for all threads and for the caller."""
        value = one_nan(self.mean(sums))
        ptx.store_shared(means + cute.arch.thread_idx()[0] * 4, [value], 4)
        self.put(value, base, place, row)

    @cute.jit
    def put(self, value, base, place, row):
        row, rows = row
        if row < rows:
            ptx.store_global(base + (Int64(place) + row) * 4, [value], 4)


def host_function(config: StatisticsConfig):
    """The host function of a kernel, which takes any number of rows."""
    weight, bias = config.weight_dtype, config.bias_dtype
    return HostFunction(
        config.arch,
        Statistics(config),
        any_source(config.dtype, config.bulk),
        any_tensor(NUMERIC[weight], 1, weight.itemsize),
        None if bias is None else any_tensor(NUMERIC[bias], 1, bias.itemsize),
        any_tensor(Float32, 1, 4),
        Float32(0.0),
    )
