# mypy: ignore-errors
"""Accumulators from Tensor Memory to the output: scaled, added to, rounded once, and stored by TMA
or one element at a time. A warp has 32 rows, and each of its threads has one of them."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass import min as least

from ...dtypes import BFLOAT16, FLOAT16
from ..common.copies import TmaTiles
from ..common.factor import factor_of
from ..common.persistent import advance_pipeline
from . import ptx
from .config import CLC_STAGES
from .roles import Pipeline

__all__ = ["Epilogue"]

_KINDS = {BFLOAT16: "bf16", FLOAT16: "f16"}


class Epilogue:
    """Stores all tiles: the work of a warp.

    ``store_tiles`` are the buffers in shared memory and what TMA needs to store them; ``output`` is
    ``d`` (M, N), ``bias`` (N,) and ``alpha``, each of which may be None.
    """

    def __init__(self, pipeline: Pipeline, store_tiles: TmaTiles, output):
        self.config, self.pipeline = pipeline.config, pipeline
        self.store_tiles, self.output = store_tiles, output

    @cute.jit
    def __call__(self):
        config, clc = self.config, self.pipeline.clc
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        free, which, phase = Int32(0), Int32(0), Int32(0)
        self.begin()
        index, clc_stage, clc_phase = clc.first()
        while index >= 0:
            row, column = self.pipeline.tile(index)
            row = row + warp * 32
            ptx.mbarrier_wait(self.pipeline.acc_full + which * 8, phase, config.ctas)
            ptx.fence_after_thread_sync()
            acc = self.pipeline.tmem + (warp << 21) + which * config.acc_stride
            self.store_acc(acc, which, free, warp, row, column)
            which, phase = advance_pipeline(which, phase, 2)
            free = advance_pipeline(free, Int32(0), config.acc_stages)[0]
            index = clc.read(clc_stage, clc_phase)
            cute.arch.sync_warp()
            if lane == 0:
                clc.release(clc_stage)
            clc_stage, clc_phase = advance_pipeline(clc_stage, clc_phase, CLC_STAGES)
        if const_expr(config.tma_store):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def begin(self) -> None:
        """Do what comes before the first tile: nothing here."""

    @cute.jit
    def store_acc(self, acc, which, free, warp, row, column):
        """Store an accumulator, the ``which``-th of two. This warp's first element of the output is
        at ``row``, ``column``; ``free`` is the index of the
        mbarrier that releases it."""
        config = self.config
        for i in range_constexpr(config.subtiles):
            subtile = self.order(i, which)
            values = ptx.tcgen05_ld(acc + subtile * config.subtile_n, config.subtile_n)
            if const_expr(i + 1 == config.early_release):
                self.release(free)
            self.store(values, i, warp, row, column + subtile * config.subtile_n)

    def order(self, i, which):
        """The ``i``-th subtile to read: those that the next accumulator overlaps come first."""
        if self.config.acc_stages > 1:
            return Int32(i)
        return (self.config.subtiles - 1 - i) * (1 - which) + i * which

    @cute.jit
    def release(self, free):
        """Tell the MMA warp that it may overwrite what the accumulators share."""
        ptx.fence_before_thread_sync()
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            barrier = self.pipeline.acc_empty + free * 8
            ptx.mbarrier_arrive(barrier, self.pipeline.cta.rank, self.config.ctas)

    @cute.jit
    def store(self, values, i: cutlass.Constexpr, warp, row, column):
        """Store the ``i``-th subtile, whose first element is at ``row``, ``column``."""
        config, lane, (d, bias, alpha) = self.config, cute.arch.lane_idx(), self.output
        values = self.scale(values, bias, alpha, column)
        if const_expr(not config.tma_store):
            self.store_each(values, d, row + lane, column)
        else:
            if const_expr(config.accumulate and not config.reduces):
                values = self.add(values, d, row + lane, column)
            self.acquire()
            stage = self.stage(i, warp)
            self.put(values, self.line(stage), lane)
            self.store_stage(stage, row, column)

    def acquire(self) -> None:
        """Wait until a store has read the buffer that is used next."""
        cute.arch.cp_async_bulk_wait_group(self.config.epilogue_stages - 1, read=True)
        cute.arch.sync_warp()

    def stage(self, i, warp):
        """The buffer of the ``i``-th store of a tile."""
        return warp * self.config.epilogue_stages + i % self.config.epilogue_stages

    def line(self, stage):
        """The address of the thread's row in a buffer."""
        start = self.store_tiles.address + stage * self.store_tiles.copies.nbytes
        return start + cute.arch.lane_idx() * self.config.store_row_bytes

    def store_stage(self, stage, row, column) -> None:
        """Store a buffer when all threads of the warp have put their rows there."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if const_expr(self.config.reduces):  # a reduction elects a thread itself
            self.store_tiles.store(stage, (row, column))
        else:
            with cute.arch.elect_one():
                self.store_tiles.store(stage, (row, column))
        cute.arch.cp_async_bulk_commit_group()

    def scale(self, values, bias, alpha, column) -> list:
        """``alpha * acc + bias``, where ``alpha`` is (), a pair or None, and ``bias`` (N,) or
        None."""
        if alpha is not None:
            factor = factor_of(alpha)
            values = [ptx.mul(value, factor) for value in values]
        if bias is not None:
            last = bias.shape[0] - 1
            added = [Float32(bias[least(column + j, last)]) for j in range(len(values))]
            values = [ptx.add(*pair) for pair in zip(values, added, strict=True)]
        return values

    def add(self, values, d, row, column) -> list:
        """Add what a 16-bit output holds, of which 16 bytes of a row are inside or none of them."""
        kind, start, added = _KINDS[self.config.out_dtype], d.iterator.toint(), []
        for j in range(0, len(values), 8):
            inside = Int32(row < d.shape[0]) & Int32(column + j < d.shape[1])
            words = ptx.ld_global_v4(start + d.layout((row, column + j)) * 2, inside)
            held = [value for word in words for value in ptx.widen(word, kind)]
            added += [ptx.add(values[j + k], held[k]) for k in range(8)]
        return added

    def put(self, values, line, lane) -> None:
        """Put a thread's values into its line of shared memory, swizzled."""
        kind = _KINDS.get(self.config.out_dtype)
        words = values
        if kind is not None:
            pairs = zip(values[::2], values[1::2], strict=True)
            words = [ptx.cvt_rn_x2(*pair, kind) for pair in pairs]
        for chunk in range(8):
            ptx.st_shared_v4(line + (chunk ^ lane % 8) * 16, words[4 * chunk : 4 * chunk + 4])

    @cute.jit
    def store_each(self, values, d, row, column):
        """Store where rows may start anywhere."""
        for j in range_constexpr(len(values)):
            if row < d.shape[0] and column + j < d.shape[1]:
                value = values[j]
                if const_expr(self.config.accumulate):
                    value = ptx.add(value, Float32(d[row, column + j]))
                d[row, column + j] = d.element_type(value)
