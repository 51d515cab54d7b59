# mypy: ignore-errors
"""A warpgroup's accumulators, which are those of the output transposed, to the output: scaled,
added to, rounded once, stored by TMA or one by one.

A thread's four values in eight columns of a wgmma are those of two rows of the output, in two
columns that are eight apart. All 64 rows of a wgmma are columns of the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, const_expr, cute, range_constexpr

from ...dtypes import BFLOAT16, FLOAT16
from ..common.copies import TmaTiles
from ..common.factor import factor_of
from . import ptx
from .epilogue import store_rows
from .mixed_config import Config

__all__ = ["MixedEpilogue", "put_rows"]

_KINDS = {BFLOAT16: "bf16", FLOAT16: "f16"}


@dataclass(frozen=True)
class MixedEpilogue:
    """Stores tiles of ``d`` (M, N): a warpgroup's work. ``boxes``: of it, in shared memory, if any;
    ``bias`` (N,); ``alpha`` as of ``factor_of``."""

    config: Config
    boxes: TmaTiles | None
    d: Any
    bias: Any
    alpha: Any

    @cute.jit
    def __call__(self, acc, share, thread, row, column, end=None, group=None):
        """Store a tile's rows of the output, and 64 columns, from ``row`` and ``column`` on; but
        nothing from row ``end`` on, if that is given. ``group``: whose it is, if there are any."""
        self.scale(acc, thread, column, group)
        if const_expr(self.config.tma_store):
            self.store(acc, share, thread, row, column, end)
        else:
            self.store_each(acc, thread, row, column, end)

    @cute.jit
    def scale(self, acc, thread, column, group):
        """``alpha * acc + bias`` in place."""
        bias, alpha = self.bias, self.alpha
        gain, added = self.config.gain, []
        factor = None if alpha is None else factor_of(alpha, group)
        for half in range_constexpr(0 if bias is None else 2):
            where = column + thread // 32 * 16 + thread % 32 // 4 + half * 8
            added.append(Float32(bias[cutlass.min(where, bias.shape[0] - 1)]))
        for eight in range_constexpr(self.config.rows // 8):
            for i in range_constexpr(4):
                value = acc[4 * eight + i]
                if const_expr(gain != 1):
                    value = value * Float32(gain)
                if const_expr(alpha is not None):
                    value = value * factor
                if const_expr(bias is not None):
                    value = value + added[i // 2]
                acc[4 * eight + i] = value

    @cute.jit
    def store(self, acc, share, thread, row, column, end):
        """Store boxes of 64 rows x 64 columns."""
        for down in range_constexpr(0, self.config.rows, 64):
            if thread < 32:  # the last store has read the buffer
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.sync(share)
            box = share % self.config.own_shares
            address = self.boxes.address + box * self.boxes.copies.nbytes
            self.put(acc, address, down, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.sync(share)
            if const_expr(end is None):
                self.send(thread, box, row + down, column)
            else:
                if row + down + 64 <= end:
                    self.send(thread, box, row + down, column)
                else:
                    store_rows(self.d, address, 128, thread, row + down, column, end)

    @cute.jit
    def send(self, thread, box, row, column):
        """Store a box by TMA."""
        if thread < 32:
            self.boxes.store(box, (row, column))
            cute.arch.cp_async_bulk_commit_group()

    def sync(self, share):
        cute.arch.barrier(barrier_id=share + 1, number_of_threads=128)

    def put(self, acc, address, row: int, thread) -> None:
        """Put a box's values into shared memory, swizzled: 16 bits each."""
        put_rows(acc, row, 64, address, thread, _KINDS[self.config.out_dtype])

    @cute.jit
    def store_each(self, acc, thread, row, column, end):
        """Store where rows may start anywhere."""
        config, d = self.config, self.d
        end = d.shape[0] if end is None else end
        warp, lane = thread // 32, thread % 32
        for group in range_constexpr(config.rows // 8):
            for i in range_constexpr(4):
                r = row + group * 8 + lane % 4 * 2 + i % 2
                c = column + warp * 16 + lane // 4 + i // 2 * 8
                if r < end and c < d.shape[1]:
                    value = acc[4 * group + i]
                    if const_expr(config.accumulate):
                        value = value + Float32(d[r, c])
                    d[r, c] = d.element_type(value)


def put_rows(acc, row: int, rows: int, address, thread, kind: str) -> None:
    """Put ``rows`` rows of 64 columns, from ``row`` on, into shared memory,
    swizzled: 16 bits each; the work of a warpgroup."""
    warp, lane = thread // 32, thread % 32
    within = lane // 16 * 8 + lane % 8  # row of two groups of eight
    chunk = (2 * warp + lane // 8 % 2) ^ (lane % 8)
    line = address + within * 128 + chunk * 16
    for group in range(0, rows // 8, 2):
        words = []
        for j in (0, 1):
            first = (row + 8 * (group + j)) // 2
            words += [ptx.cvt_rn_x2(acc[first + i], acc[first + i + 1], kind) for i in (0, 2)]
        ptx.stmatrix_trans(line + group * 8 * 128, words)
