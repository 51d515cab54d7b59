# mypy: ignore-errors
"""The mainloop of FP8 by MXFP4 (``upcast_gemm``): as that of FP8, but a list says how many K blocks
a tile has.

What scales a partial accumulator is read while the one before is added: warps that make E4M3 keep
shared memory busy, and wait longer for it than wgmmas take.
"""

from __future__ import annotations

from itertools import repeat

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr

from . import ptx
from .fp8_gemm import Mainloop
from .upcast_ptx import absolute, is_positive, ld_shared_if

__all__ = ["UpcastMainloop"]


class UpcastMainloop(Mainloop):
    """``b_scale``: where a stage has the factor of B, which is negative in the last K block."""

    def __init__(self, config, *rest):
        super().__init__(config, *rest)
        self.ahead = cute.make_rmem_tensor((2 * config.row_steps + 1,), Float32)

    @cute.jit
    def __call__(self, acc, tile, k_blocks, stage, phase):
        self.a_scale_of_tile = self.a_scale
        if const_expr(self.config.rows_grouped):
            self.a_scale_of_tile = ptx.pin(self.a_scale + tile.a_row % 4 * 4)
        more = Int32(k_blocks > 0)
        if more != 0:
            self.pipeline.consumer_wait(stage, phase)
            self.read_ahead(stage)
        # Whether the last first pass is followed by others the device knows: a loop for that alone,
        # as in one that depends on it the compiler takes what is the same in a warp for different.
        for _ in range(k_blocks - 1):
            stage, phase, more = self.k_block(acc, stage, phase, True)
        while more != 0:
            stage, phase, more = self.k_block(acc, stage, phase, False)
        return stage, phase

    @cute.jit
    def k_block(self, acc, stage, phase, has_next: cutlass.Constexpr):
        """The next one, which is there; and whether there are more, if ``has_next`` does not say
        so."""
        mma_tiles, here, rows, more = self.config.mma_tiles, stage, None, Int32(1)
        for i in range_constexpr(len(mma_tiles)):
            row_step, column_step = mma_tiles[i]
            last = i == len(mma_tiles) - 1
            self.mma(here, row_step, column_step)
            if const_expr(i == 0):
                factor = self.factor()
                rows = self.scaled(factor)
                if const_expr(not has_next):
                    more = is_positive(factor)
            if const_expr(last):
                stage, phase = self.pipeline.consumer_next(stage, phase)
                if more != 0:
                    self.pipeline.consumer_wait(stage, phase)
                    self.read_ahead(stage)
            ptx.wgmma_wait_group(0)
            scales = repeat(rows[row_step], self.config.mma_n // 8)
            self.promote(acc[i], scales, here if last else None)
        return stage, phase, more

    def read_ahead(self, stage) -> None:
        """What scales the rows of A, and the factor of B, of which one lane reads."""
        for step, pair in enumerate(self.row_scales(stage)):
            self.ahead[2 * step], self.ahead[2 * step + 1] = pair
        address = self.b_scale + stage * self.config.b_scales_apart
        self.ahead[2 * self.config.row_steps] = ld_shared_if(self.lane == self.rank, address)

    def factor(self):
        """Of B, in all lanes."""
        own = self.ahead[2 * self.config.row_steps]
        return cute.arch.shuffle_sync(own, self.rank)

    def scaled(self, factor) -> list:
        """What scales two rows of a thread, in each step down the rows."""
        size = absolute(factor)
        return [
            [ptx.mul(self.ahead[2 * step + i], size) for i in (0, 1)]
            for step in range(self.config.row_steps)
        ]
