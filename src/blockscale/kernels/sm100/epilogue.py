# mypy: ignore-errors
"""Sums from Tensor Memory to the output: scaled, added to, rounded once, stored by TMA or one by
one. A warp has 32 rows, a thread one of them."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass import min as least

from ...dtypes import BFLOAT16, FLOAT16
from ..common.copies import Copies
from ..common.factor import factor_of
from ..common.persistent import advance_pipeline
from . import ptx
from .config import TURNS
from .roles import Pipeline

__all__ = ["Epilogue"]

_KINDS = {BFLOAT16: "bf16", FLOAT16: "f16"}


class Epilogue:
    """Stores all tiles: a warp's work. ``copies``, ``out``, ``atom``, ``view``: of the boxes, in
    shared memory and by TMA; ``output``: ``d`` (M, N), ``bias`` (N,) and ``alpha``, or None."""

    def __init__(self, pipeline: Pipeline, copies: Copies, out, atom, view, output):
        self.config, self.pipeline, self.copies = pipeline.config, pipeline, copies
        self.out, self.atom, self.view, self.output = out, atom, view, output

    @cute.jit
    def __call__(self):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        free, which, phase = Int32(0), Int32(0), Int32(0)
        self.begin()
        index, turn, turn_phase = self.pipeline.turns.first()
        while index >= 0:
            row, column = self.pipeline.tile(index)
            row = row + warp * 32
            ptx.wait(self.pipeline.ready + which * 8, phase, config.ctas)
            ptx.sums_known()
            sums = self.pipeline.memory + (warp << 21) + which * config.apart
            self.take(sums, which, free, warp, row, column)
            which, phase = advance_pipeline(which, phase, 2)
            free = advance_pipeline(free, Int32(0), config.sums)[0]
            index = self.pipeline.turns.read(turn, turn_phase)
            cute.arch.sync_warp()
            if lane == 0:
                self.pipeline.turns.leave(turn)
            turn, turn_phase = advance_pipeline(turn, turn_phase, TURNS)
        if const_expr(config.tma_store):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def begin(self) -> None:
        """Before the first tile."""

    @cute.jit
    def take(self, sums, which, free, warp, row, column):
        """Store a tile whose first element, of this warp, is at ``row``, ``column``."""
        config = self.config
        for i in range_constexpr(config.boxes):
            box = self.order(i, which)
            values = ptx.load_sums(sums + box * config.box_columns, config.box_columns)
            if const_expr(i + 1 == config.early_boxes):
                self.release(free)
            self.store(values, i, warp, row, column + box * config.box_columns)

    def order(self, i, which):
        """The ``i``-th box: what the next sums overlap comes first."""
        if self.config.sums > 1:
            return Int32(i)
        return (self.config.boxes - 1 - i) * (1 - which) + i * which

    @cute.jit
    def release(self, free):
        """Tell the one who multiplies that the next sums may be begun."""
        ptx.sums_read()
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            barrier = self.pipeline.freed + free * 8
            ptx.arrive(barrier, self.pipeline.place.rank, self.config.ctas)

    @cute.jit
    def store(self, values, i: cutlass.Constexpr, warp, row, column):
        """Store the ``i``-th box; its first element is at ``row``, ``column``."""
        config, lane, (d, bias, alpha) = self.config, cute.arch.lane_idx(), self.output
        values = self.scale(values, bias, alpha, column)
        if const_expr(not config.tma_store):
            self.store_each(values, d, row + lane, column)
        else:
            if const_expr(config.accumulate and not config.reduces):
                values = self.add(values, d, row + lane, column)
            self.wait_for_slot()
            slot = self.slot(i, warp)
            self.put(values, self.line(slot), lane)
            self.store_slot(slot, row, column)

    def wait_for_slot(self) -> None:
        """Until the store before those in flight has read its buffer."""
        cute.arch.cp_async_bulk_wait_group(self.config.c_buffers - 1, read=True)
        cute.arch.sync_warp()

    def slot(self, i, warp):
        """Buffer of the ``i``-th store of a tile."""
        return warp * self.config.c_buffers + i % self.config.c_buffers

    def line(self, slot):
        """Address of the thread's row."""
        start = self.out.iterator.toint() + slot * self.copies.nbytes
        return start + cute.arch.lane_idx() * self.config.store_bytes

    def store_slot(self, slot, row, column) -> None:
        """When all of the warp have put their rows there."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        where = self.atom, self.view, self.out, slot, (row, column)
        if const_expr(self.config.reduces):  # which chooses a thread itself
            self.copies.store(*where)
        else:
            with cute.arch.elect_one():
                self.copies.store(*where)
        cute.arch.cp_async_bulk_commit_group()

    def scale(self, values, bias, alpha, column) -> list:
        """``alpha * sum + bias``: ``alpha`` (), or a pair; ``bias`` (N,); or None."""
        if alpha is not None:
            factor = factor_of(alpha)
            values = [ptx.multiply_float(value, factor) for value in values]
        if bias is not None:
            last = bias.shape[0] - 1
            added = [Float32(bias[least(column + j, last)]) for j in range(len(values))]
            values = [ptx.sum_float(*pair) for pair in zip(values, added, strict=True)]
        return values

    def add(self, values, d, row, column) -> list:
        """With what a 16-bit output holds: 16 bytes of a row are in it, or none of them."""
        kind, start, sums = _KINDS[self.config.out_dtype], d.iterator.toint(), []
        for j in range(0, len(values), 8):
            inside = Int32(row < d.shape[0]) & Int32(column + j < d.shape[1])
            words = ptx.load_words(start + d.layout((row, column + j)) * 2, inside)
            held = [value for word in words for value in ptx.widen(word, kind)]
            sums += [ptx.sum_float(values[j + k], held[k]) for k in range(8)]
        return sums

    def put(self, values, line, lane) -> None:
        """Put a thread's values into its line of shared memory, swizzled."""
        kind = _KINDS.get(self.config.out_dtype)
        words = values
        if kind is not None:
            pairs = zip(values[::2], values[1::2], strict=True)
            words = [ptx.round_pair(*pair, kind) for pair in pairs]
        for chunk in range(8):
            ptx.store_words(line + (chunk ^ lane % 8) * 16, words[4 * chunk : 4 * chunk + 4])

    @cute.jit
    def store_each(self, values, d, row, column):
        """Store where rows may start anywhere."""
        for j in range_constexpr(len(values)):
            if row < d.shape[0] and column + j < d.shape[1]:
                value = values[j]
                if const_expr(self.config.accumulate):
                    value = ptx.sum_float(value, Float32(d[row, column + j]))
                d[row, column + j] = d.element_type(value)
