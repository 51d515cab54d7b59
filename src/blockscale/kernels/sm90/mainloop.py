# mypy: ignore-errors
"""Products of a tile's K blocks, each scaled and added to the tile's sum in registers.

A warpgroup goes through its rows and columns in batches, of four wgmmas each: the partial sum of a
K block, which is multiplied by the scales of its rows and columns as it is added. With two partial
sums, the tensor cores have the next batch before the last one is added; with one, the other
warpgroup keeps them busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, const_expr, cute, range_constexpr

from . import ptx
from .config import BLOCK_K, Config

__all__ = ["Mainloop"]

_COLUMNS = 8  # of a wgmma's result, of which a thread has two, in two rows


@dataclass(frozen=True)
class Batch:
    """Products that have been started: where they belong, and what they are scaled by."""

    sums: Any
    parts: Any
    column: int
    row_scales: list
    column_scales: Any  # of its segments; or the address of those of the stage
    release: Any  # the barrier of the stage, if it is not needed after this batch


class Mainloop:
    def __init__(self, config: Config):
        self.config = config

    def allocate(self) -> list:
        """Sums of a thread, a tensor for each batch."""
        config = self.config
        count = config.row_steps * config.column_steps
        self.parts = [
            cute.make_rmem_tensor((config.batch // 2,), Float32) for _ in range(config.partials)
        ]
        for each in self.parts:
            each.fill(0.0)
        self.kept = cute.make_rmem_tensor((2 + config.b_scales,), Float32)
        return [cute.make_rmem_tensor((config.batch // 2,), Float32) for _ in range(count)]

    def start(self, shared, b_scales, full, empty, sharing, rows, thread) -> None:
        """Addresses of a thread of the warpgroup that has the tile's rows from ``rows`` on.
        ``sharing``: the first of the cluster's blocks that share tiles with this one.
        """
        a, b, a_scales = shared
        self.full, self.empty, self.sharing = full, empty, sharing
        warp, lane = thread // 32, thread % 32
        self.lane = lane
        base = a + rows * BLOCK_K
        if self.config.a_registers:
            row = warp * 16 + lane % 16
            self.a = ptx.pin(base + row * BLOCK_K + ((lane // 16) ^ (row % 8)) * 16)
        else:
            self.a = cute.arch.make_warp_uniform(ptx.descriptor(base))
        self.b = cute.arch.make_warp_uniform(ptx.descriptor(b))
        self.a_scales = ptx.pin(a_scales + (rows + warp * 16 + lane // 4) * 4)
        own = lane % 4 * 8 if self.config.b_block[0] == 1 else 0
        self.b_scales = ptx.pin(b_scales + own)

    @cute.jit
    def __call__(self, sums, blocks, stage, phase, advance):
        """Add ``blocks`` K blocks to ``sums``; the next stage and phase."""
        unroll = self.config.unroll
        if const_expr(self.config.carries):
            self.parts[1].fill(0.0)
            self.kept.fill(0.0)
        cute.arch.mbarrier_wait(self.full + stage, phase)
        whole = blocks // unroll
        for i in range(whole):
            more = (i + 1) * unroll < blocks
            stage, phase = self.body(sums, unroll, more, stage, phase, advance)
        if const_expr(unroll > 1):
            for i in range(whole * unroll, blocks):
                stage, phase = self.body(sums, 1, i + 1 < blocks, stage, phase, advance)
        if const_expr(self.config.carries):
            self.finish(self.carried(sums))
        return stage, phase

    @cute.jit
    def body(self, sums, count, more, stage, phase, advance):
        """``count`` K blocks, the first of which is there. No wgmma is in flight at its ends: else
        the compiler would wait for each of them. But a partial sum may be left, and added later.
        """
        config = self.config
        batches = config.row_steps * config.column_steps
        row_scales, column_scales, fragments = None, None, None
        started = self.carried(sums) if config.carries else None
        for index in range_constexpr(count * batches):
            block, i = index // batches, index % batches
            row_step, column_step = i // config.column_steps, i % config.column_steps
            here = stage
            if const_expr(config.a_registers and column_step == 0):
                if const_expr(config.partials == 2):  # wgmmas read the last fragments
                    ptx.wait_products(0)
                fragments = self.fragments(here, row_step)
            parts = self.parts[(index - count * batches) % config.partials]
            self.products(parts, here, row_step, column_step, fragments)
            if const_expr(i == 0):
                row_scales, column_scales = self.scales(here)
            if const_expr(i == batches - 1):
                stage, phase = advance(stage, phase)
                if const_expr(block < count - 1):
                    cute.arch.mbarrier_wait(self.full + stage, phase)
                else:
                    if more:
                        cute.arch.mbarrier_wait(self.full + stage, phase)
            last, started = (
                started,
                Batch(
                    sums[i],
                    parts,
                    column_step * config.batch,
                    row_scales[row_step],
                    column_scales,
                    (self.empty + here).toint() if i == batches - 1 else None,
                ),
            )
            if const_expr(config.partials == 1):
                ptx.wait_products(0)
                self.finish(started)
            elif const_expr(last is not None):
                ptx.wait_products(1)
                self.finish(last)
        if const_expr(config.partials == 2):
            ptx.wait_products(0)
            if const_expr(config.carries):
                self.keep(started)
            else:
                self.finish(started)
        return stage, phase

    def keep(self, batch: Batch) -> None:
        """Leave the last batch of a K block to be added later."""
        ptx.arrive_at(batch.release, self.lane, self.sharing, self.config.sharing)
        for i, scale in enumerate(batch.row_scales + batch.column_scales):
            self.kept[i] = scale

    def carried(self, sums) -> Batch:
        """The batch that was left; before the first one, zeros."""
        config, scales = self.config, [self.kept[i] for i in range(2 + self.config.b_scales)]
        column = (config.column_steps - 1) * config.batch
        return Batch(sums[-1], self.parts[1], column, scales[:2], scales[2:], None)

    def fragments(self, stage, row_step: int) -> list:
        """A warpgroup's 64 rows of A in registers."""
        address = self.a + stage * (self.config.tile[0] * BLOCK_K) + row_step * 64 * BLOCK_K
        return [word for step in range(4) for word in ptx.load_matrix(address ^ (32 * step))]

    def products(self, parts, stage, row_step: int, column_step: int, fragments) -> None:
        """Start a batch."""
        config = self.config
        unit = BLOCK_K // 16  # of a descriptor, for a row
        b = self.b + stage * (config.tile[1] * unit) + column_step * config.batch * unit
        a = fragments
        if a is None:
            a = self.a + stage * (config.tile[0] * unit) + row_step * 64 * unit
        for i, value in enumerate(ptx.wgmma([parts[i] for i in range(config.batch // 2)], a, b)):
            parts[i] = value

    def scales(self, stage):
        """Of A, two for each step down the rows; of B's segments, or where they are."""
        config = self.config
        a_bytes, b_bytes = config.scale_bytes
        address = self.a_scales + stage * a_bytes
        rows = [
            [ptx.load_floats(address, 256 * step + offset)[0] for offset in (0, 32)]
            for step in range(config.row_steps)
        ]
        columns = self.b_scales + stage * b_bytes
        if config.b_block[0] > 1:
            columns = [ptx.load_floats(columns, 4 * i)[0] for i in range(config.b_scales)]
        return rows, columns

    def finish(self, batch: Batch) -> None:
        """Add a batch's partial sum."""
        config = self.config
        one = config.b_block[0] == 1
        if batch.release is not None and not one:
            ptx.arrive_at(batch.release, self.lane, self.sharing, config.sharing)
        scales, scaled = None, None
        for group in range(config.batch // _COLUMNS):
            column = batch.column + group * _COLUMNS
            if one:
                pair = ptx.load_floats(batch.column_scales, 4 * column, 2)
                scales = [ptx.multiply(row, each) for row in batch.row_scales for each in pair]
            elif scaled != column // config.segment:
                scaled = column // config.segment
                each = batch.column_scales[scaled]
                scales = [ptx.multiply(row, each) for row in batch.row_scales]
            where = range(4 * group, 4 * group + 4)
            sums = ptx.fma4([batch.sums[i] for i in where], [batch.parts[i] for i in where], scales)
            for i, value in zip(where, sums, strict=True):
                batch.sums[i] = value
        if batch.release is not None and one:
            cute.arch.sync_warp()
            ptx.arrive_at(batch.release, self.lane, self.sharing, config.sharing)
