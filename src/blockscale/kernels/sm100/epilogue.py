# mypy: ignore-errors
"""Accumulators from Tensor Memory to the output: scaled, added to, rounded once, and stored by TMA
or one element at a time. A warp has 32 rows, and each of its threads has one of them."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr, select_
from cutlass import min as least

from ...dtypes import BFLOAT16, FLOAT16
from ..common.copies import TmaTiles
from ..common.factor import factor_of
from ..common.persistent import advance_pipeline
from . import ptx
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
        while clc.more(index):
            tile = self.pipeline.tiles.tile(index)
            ptx.mbarrier_wait(self.pipeline.acc_full + which * 8, phase, config.ctas)
            ptx.fence_after_thread_sync()
            acc = self.pipeline.tmem + (warp << 21) + which * config.acc_stride
            self.store_acc(acc, which, free, warp, tile)
            which, phase = advance_pipeline(which, phase, 2)
            free = advance_pipeline(free, Int32(0), config.acc_stages)[0]
            index = clc.read(clc_stage, clc_phase)
            cute.arch.sync_warp()
            if lane == 0:
                clc.release(clc_stage)
            clc_stage, clc_phase = clc.advance(clc_stage, clc_phase)
        if const_expr(config.tma_store):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def begin(self) -> None:
        """Do what comes before the first tile: nothing here."""

    @cute.jit
    def store_acc(self, acc, which, free, warp, tile):
        """Store an accumulator, the ``which``-th of two, of a tile; ``free`` is the index of the
        mbarrier that releases it."""
        config = self.config
        for i in range_constexpr(config.subtiles):
            subtile = self.order(i, which)
            values = ptx.tcgen05_ld(acc + subtile * config.subtile_n, config.subtile_n)
            if const_expr(i + 1 == config.early_release):
                self.release(free)
            self.store(values, i, warp, tile, tile.column + subtile * config.subtile_n)

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
    def store(self, values, i: cutlass.Constexpr, warp, tile, column):
        """Store the ``i``-th subtile of a tile, whose first element is in ``column``."""
        d, bias, alpha = self.output
        values = self.scale(values, bias, alpha, column, tile.group)
        row, end = tile.row + warp * 32, tile.end
        if const_expr(end is not None):  # there is no product of no K blocks
            values = [Float32(select_(tile.k_blocks > 0, each, Float32(0))) for each in values]
        if const_expr(not self.config.tma_store):
            self.store_each(values, d, row, column, d.shape[0] if end is None else end)
        elif const_expr(end is not None):
            if row + 32 <= end:
                self.store_box(values, i, warp, d, row, column)
            else:
                self.store_rows(values, d, row, column, end)
        else:
            self.store_box(values, i, warp, d, row, column)

    def store_box(self, values, i: int, warp, d, row, column) -> None:
        """Store 32 rows by TMA."""
        config, lane = self.config, cute.arch.lane_idx()
        if config.accumulate and not config.reduces:
            values = self.add(values, d, row + lane, column, d.shape[0])
        self.acquire()
        stage = self.stage(i, warp)
        self.put(values, self.line(stage), lane)
        self.store_stage(stage, row, column)

    def store_rows(self, values, d, row, column, end) -> None:
        """Store those rows that are before ``end``, a thread each, 16 bytes at a time."""
        row = row + cute.arch.lane_idx()
        if self.config.accumulate:
            values = self.add(values, d, row, column, end)
        words = self.words(values)
        for j, address, inside in self.chunks(len(values), d, row, column, end):
            ptx.st_global_v4(address, words[j // self.per_word :][:4], inside)

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

    def scale(self, values, bias, alpha, column, group=None) -> list:
        """``alpha * acc + bias``, where ``alpha`` is as of ``factor_of`` or None, and ``bias`` (N,)
        or None."""
        if alpha is not None:
            factor = factor_of(alpha, group)
            values = [ptx.mul(value, factor) for value in values]
        if bias is not None:
            last = bias.shape[0] - 1
            added = [Float32(bias[least(column + j, last)]) for j in range(len(values))]
            values = [ptx.add(*pair) for pair in zip(values, added, strict=True)]
        return values

    @property
    def per_word(self) -> int:
        """Elements of the output in a word."""
        return 4 // self.config.out_dtype.itemsize

    def chunks(self, count: int, d, row, column, end) -> list:
        """Of ``count`` values of a row from ``column`` on, each 16 bytes of the output: the first
        one, its address, and whether it is inside, all of it or nothing."""
        size, start, found = self.config.out_dtype.itemsize, d.iterator.toint(), []
        for j in range(0, count, 16 // size):
            inside = Int32(row < end) & Int32(column + j < d.shape[1])
            found.append((j, start + d.layout((row, column + j)) * size, inside))
        return found

    def add(self, values, d, row, column, end) -> list:
        """Add what a row of the output holds, if it is before ``end``."""
        kind, held = _KINDS.get(self.config.out_dtype), []
        for _, address, inside in self.chunks(len(values), d, row, column, end):
            for word in ptx.ld_global_v4(address, inside):
                held += [word.bitcast(Float32)] if kind is None else ptx.widen(word, kind)
        return [ptx.add(*pair) for pair in zip(values, held, strict=True)]

    def words(self, values) -> list:
        """As they are stored."""
        kind = _KINDS.get(self.config.out_dtype)
        if kind is None:
            return values
        pairs = zip(values[::2], values[1::2], strict=True)
        return [ptx.cvt_rn_x2(*pair, kind) for pair in pairs]

    def put(self, values, line, lane) -> None:
        """Put a thread's values into its line of shared memory, swizzled."""
        words = self.words(values)
        for chunk in range(8):
            ptx.st_shared_v4(line + (chunk ^ lane % 8) * 16, words[4 * chunk : 4 * chunk + 4])

    @cute.jit
    def store_each(self, values, d, row, column, end):
        """Store where rows may start anywhere."""
        row = row + cute.arch.lane_idx()
        for j in range_constexpr(len(values)):
            if row < end and column + j < d.shape[1]:
                value = values[j]
                if const_expr(self.config.accumulate):
                    value = ptx.add(value, Float32(d[row, column + j]))
                d[row, column + j] = d.element_type(value)
