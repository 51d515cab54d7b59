# mypy: ignore-errors
"""A warpgroup's sums, which are those of the output transposed, to the output: scaled, added to,
rounded once, stored by TMA or one by one.

A thread's four values in eight columns of a wgmma are those of two rows of the output, in two
columns that are eight apart. All 64 rows of a wgmma are columns of the output.
"""

from __future__ import annotations

import cutlass
import torch
from cutlass import Float32, const_expr, cute, range_constexpr

from ..common.copies import Copies
from ..common.factor import factor_of
from . import ptx, widened_ptx
from .widened_config import Config

__all__ = ["TransposedEpilogue"]

_KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}


class TransposedEpilogue:
    def __init__(self, config: Config, copies: Copies):
        self.config, self.copies = config, copies

    @cute.jit
    def scale(self, sums, bias, alpha, thread, column):
        """``alpha * sum + bias`` in place: ``alpha`` (), or a pair; ``bias`` (N,); or None."""
        gain, added = self.config.gain, []
        factor = None if alpha is None else factor_of(alpha)
        for half in range_constexpr(0 if bias is None else 2):
            where = column + thread // 32 * 16 + thread % 32 // 4 + half * 8
            added.append(Float32(bias[cutlass.min(where, bias.shape[0] - 1)]))
        for group in range_constexpr(self.config.rows // 8):
            for i in range_constexpr(4):
                value = sums[4 * group + i]
                if const_expr(gain != 1):
                    value = value * Float32(gain)
                if const_expr(alpha is not None):
                    value = value * factor
                if const_expr(bias is not None):
                    value = value + added[i // 2]
                sums[4 * group + i] = value

    @cute.jit
    def store(self, sums, tiles, atom, view, group, thread, corner):
        """Store boxes of 64 rows x 64 columns, from ``corner`` on."""
        for row in range_constexpr(0, self.config.rows, 64):
            if thread < 32:  # the last store has read the buffer
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.meet(group)
            box = group % self.config.own_shares
            address = tiles.iterator.toint() + box * self.copies.nbytes
            self.put(sums, address, row, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.meet(group)
            if thread < 32:
                self.copies.store(atom, view, tiles, box, (corner[0] + row, corner[1]))
                cute.arch.cp_async_bulk_commit_group()

    def meet(self, group):
        cute.arch.barrier(barrier_id=group + 1, number_of_threads=128)

    def put(self, sums, address, row: int, thread) -> None:
        """Put a box's values into shared memory, swizzled: 16 bits each."""
        kind = _KINDS[self.config.out_dtype]
        warp, lane = thread // 32, thread % 32
        within = lane // 16 * 8 + lane % 8  # row of two groups of eight
        chunk = (2 * warp + lane // 8 % 2) ^ (lane % 8)
        line = address + within * 128 + chunk * 16
        for group in range(0, 8, 2):
            words = []
            for j in (0, 1):
                first = (row + 8 * (group + j)) // 2
                words += [
                    ptx.round_pair(sums[first + i], sums[first + i + 1], kind) for i in (0, 2)
                ]
            widened_ptx.store_matrix_transposed(line + group * 8 * 128, words)

    @cute.jit
    def store_each(self, sums, d, thread, corner):
        """Store where rows may start anywhere, from ``corner`` on."""
        config = self.config
        warp, lane = thread // 32, thread % 32
        for group in range_constexpr(config.rows // 8):
            for i in range_constexpr(4):
                r = corner[0] + group * 8 + lane % 4 * 2 + i % 2
                c = corner[1] + warp * 16 + lane // 4 + i // 2 * 8
                if r < d.shape[0] and c < d.shape[1]:
                    value = sums[4 * group + i]
                    if const_expr(config.accumulate):
                        value = value + Float32(d[r, c])
                    d[r, c] = d.element_type(value)
