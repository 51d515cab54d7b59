# mypy: ignore-errors
"""Products of a tile's K blocks, each scaled and added to the tile's sums in registers.

A warpgroup goes through its rows and columns in batches, of four wgmmas each: the partial sum of a
K block, which is multiplied by the scales of its rows and columns as it is added. While it adds,
the other warpgroup keeps the tensor cores busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice, tee
from typing import Any

from cutlass import Int32, const_expr, cute, range_constexpr

from . import ptx
from .config import BLOCK_K, Config
from .loop import Loop

__all__ = ["Mainloop"]

_COLUMNS = 8  # of a wgmma's result, of which a thread has two, in two rows
_AHEAD = 5  # pairs of scales that are read before they are needed: there are registers for so many


class Mainloop(Loop):
    config: Config

    def allocate(self) -> list:
        self.parts = self.zeros()
        return super().allocate()

    def start(self, shared, full, empty, rows, thread) -> None:
        """``shared``: tiles, and scales of A and of B."""
        a, b, a_scales, b_scales = shared
        self.full, self.empty = full, empty
        warp, lane = thread // 32, thread % 32
        self.lane = lane
        self.a = cute.arch.make_warp_uniform(ptx.descriptor(a + rows * BLOCK_K))
        self.b = cute.arch.make_warp_uniform(ptx.descriptor(b))
        self.a_scales = ptx.pin(a_scales + (rows + warp * 16 + lane // 4) * 4)
        own = lane % 4 * 8 if self.config.b_block[0] == 1 else 0
        self.rank = Int32(0)  # of the block in its cluster: of the lanes, this one arrives for it
        if self.config.blocks > 1:
            self.rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        self.b_scales = ptx.pin(b_scales + own)
        self.pairs = {}

    @cute.jit
    def __call__(self, sums, blocks, stage, phase):
        """Add ``blocks`` K blocks to ``sums``; the next stage and phase."""
        unroll = self.config.unroll
        if blocks > 0:
            self.ring.wait(self.full, stage, phase)
        whole = blocks // unroll
        for i in range(whole):
            more = (i + 1) * unroll < blocks
            stage, phase = self.body(sums, unroll, more, stage, phase)
        if const_expr(unroll > 1):
            for i in range(whole * unroll, blocks):
                stage, phase = self.body(sums, 1, i + 1 < blocks, stage, phase)
        return stage, phase

    @cute.jit
    def body(self, sums, count, more, stage, phase):
        """``count`` K blocks, the first of which is there. No wgmma is in flight at its ends: else
        the compiler would wait for each of them.
        """
        for block in range_constexpr(count):
            here, rows = stage, None
            for i in range_constexpr(len(self.batches)):
                row_step, column_step = self.batches[i]
                last = i == len(self.batches) - 1
                self.products(here, row_step, column_step)
                if const_expr(i == 0):
                    rows = self.row_scales(here)
                columns = self.column_scales(here, row_step, column_step)
                if const_expr(last):
                    stage, phase = self.ring.next(stage, phase)
                    if const_expr(block < count - 1):
                        self.ring.wait(self.full, stage, phase)
                    else:
                        if more:
                            self.ring.wait(self.full, stage, phase)
                ptx.wait_products(0)
                release = here if last else None
                self.add(sums[i], rows[row_step], columns, release)
        return stage, phase

    def products(self, stage, row_step: int, column_step: int) -> None:
        """Start a batch."""
        config = self.config
        unit = BLOCK_K // 16  # of a descriptor, for a row
        a = self.a + stage * (config.tile[0] * unit) + row_step * 64 * unit
        b = self.b + stage * (config.tile[1] * unit) + column_step * config.batch * unit
        parts = self.parts
        for i, value in enumerate(ptx.wgmma([parts[i] for i in range(config.batch // 2)], a, b)):
            parts[i] = value
        if not config.alternate:  # small batches end before what is read then is there
            ptx.keep_below()

    def row_scales(self, stage) -> list[list[Any]]:
        """Of A, two for each step down the rows."""
        address = self.a_scales + stage * self.config.scale_bytes[0]
        return [
            [ptx.load_floats(address, 256 * step + offset)[0] for offset in (0, 32)]
            for step in range(self.config.row_steps)
        ]

    def column_scales(self, stage, row_step: int, column_step: int) -> Iterator[list[Any]]:
        """Of B, for each eight columns of a batch: one, or those of a thread's two columns. Some
        of these are read at once, while the tensor cores work; the others as they are needed. All
        steps down the rows have those that are read in the first one.
        """
        config = self.config
        address, first = self.b_scales + stage * config.scale_bytes[1], column_step * config.batch
        columns = range(first, first + config.batch, _COLUMNS)
        if config.b_block[0] == 1:
            if row_step == 0:
                pairs = _ahead(ptx.load_floats(address, 4 * column, 2) for column in columns)
                self.pairs[column_step] = tee(pairs, config.row_steps)
            return self.pairs[column_step][row_step]
        # Read again in each step: with few rows, the first wgmmas would wait for all of it.
        segments = [column // config.segment for column in columns]
        found = {
            i: [ptx.load_for_warp(address, 4 * i, self.lane, self.rank)]
            for i in dict.fromkeys(segments)
        }
        return iter([found[i] for i in segments])

    def add(self, sums, rows: list, columns: Iterator[list], release) -> None:
        """Add a batch's partial sum. ``release``: the stage, if it is not needed after this."""
        early = self.config.b_block[0] > 1 or self.config.row_steps > 1  # nothing more is read
        if release is not None and early:
            self.release(release)
        scales, scaled = None, None
        for group, column in enumerate(columns):
            if scaled is not column:
                scaled = column
                scales = [ptx.multiply(row, each) for row in rows for each in column]
            where = range(4 * group, 4 * group + 4)
            parts = [self.parts[i] for i in where]
            added = ptx.fma4([sums[i] for i in where], parts, scales)
            for i, value in zip(where, added, strict=True):
                sums[i] = value
        if release is not None and not early:
            self.release(release)


def _ahead(items: Iterator[Any]) -> Iterator[Any]:
    """The items, of which some are made before they are asked for; the first ones at once."""
    made = deque(islice(items, _AHEAD))

    def rest():
        while made:
            made.extend(islice(items, 1))
            yield made.popleft()

    return rest()
