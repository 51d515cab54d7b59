# mypy: ignore-errors
"""The epilogue of sums that are those of the output transposed: B is the left operand."""

from __future__ import annotations

import cutlass
from cutlass import Float32, const_expr, cute, range_constexpr

from . import ptx, widened_ptx
from .epilogue import _KINDS, Epilogue

__all__ = ["TransposedEpilogue"]


class TransposedEpilogue(Epilogue):
    """A thread's four values in a step's eight columns are those of two rows of the output, in two
    columns that are eight apart."""

    @cute.jit
    def scale(self, sums, bias, alpha, thread, column):
        """``alpha * sum + bias`` in place: ``alpha`` () fp32, ``bias`` (N,), or None."""
        config = self.config
        factor = None if alpha is None else alpha.iterator.load()
        steps = config.row_steps if alpha is not None or bias is not None else 0
        for row_step in range_constexpr(steps):
            added = []
            for half in range_constexpr(0 if bias is None else 2):
                where = column + row_step * 64 + thread // 32 * 16 + thread % 32 // 4 + half * 8
                added.append(Float32(bias[cutlass.min(where, bias.shape[0] - 1)]))
            for i in range_constexpr(config.batch // 2):
                value = sums[row_step][i]
                if const_expr(alpha is not None):
                    value = value * factor
                if const_expr(bias is not None):
                    value = value + added[i // 2 % 2]
                sums[row_step][i] = value

    @cute.jit
    def store(self, sums, tiles, atom, view, group, thread, row, column):
        """Store boxes of 64 rows x 64 columns, ``c_buffers`` at a time."""
        config = self.config
        first = group * config.c_buffers
        down = config.batch // 64
        base = tiles.iterator.toint() + first * self.copies.nbytes
        for start in range_constexpr(0, config.boxes, config.c_buffers):
            if thread < 32:  # stores have read the buffers
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.meet(group)
            for i in range_constexpr(config.c_buffers):
                box = start + i
                self.put(sums, base + i * self.copies.nbytes, box // down, box % down * 64, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.meet(group)
            if thread < 32:
                for i in range_constexpr(config.c_buffers):
                    box = start + i
                    position = (row + box % down * 64, column + box // down * 64)
                    self.copies.store(atom, view, tiles, first + i, position)
                cute.arch.cp_async_bulk_commit_group()

    def put(self, sums, address, row_step: int, row: int, thread) -> None:
        """Put a box's values into shared memory, swizzled: 16 bits each."""
        kind = _KINDS[self.config.out_dtype]
        warp, lane = thread // 32, thread % 32
        within = lane // 16 * 8 + lane % 8  # row of two groups of eight
        chunk = (2 * warp + lane // 8 % 2) ^ (lane % 8)
        line = address + within * 128 + chunk * 16
        for group in range(0, 8, 2):
            words = []
            for j in (0, 1):
                values = [self.value(sums, row_step, row + 8 * (group + j), i) for i in range(4)]
                words += [ptx.round_pair(*values[i : i + 2], kind) for i in (0, 2)]
            widened_ptx.store_matrix_transposed(line + group * 8 * 128, words)

    @cute.jit
    def store_each(self, sums, d, thread, row, column):
        """Store where rows may start anywhere."""
        config = self.config
        warp, lane = thread // 32, thread % 32
        for row_step in range_constexpr(config.row_steps):
            for group in range_constexpr(config.batch // 8):
                for i in range_constexpr(4):
                    r = row + group * 8 + lane % 4 * 2 + i % 2
                    c = column + row_step * 64 + warp * 16 + lane // 4 + i // 2 * 8
                    if r < d.shape[0] and c < d.shape[1]:
                        value = self.value(sums, row_step, group * 8, i)
                        if const_expr(config.accumulate):
                            value = value + Float32(d[r, c])
                        d[r, c] = d.element_type(value)
