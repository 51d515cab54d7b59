# mypy: ignore-errors
"""Products of a tile's K blocks: B dequantized in registers, while wgmmas run.

A unit of work is 64 rows of B and 64 columns of K, half a stage or all of it: four wgmmas. A thread
has 16 neighbours along K of two rows, which lie together in memory and share a scale each: two
octets. Octets of the next unit are widened while a unit's wgmmas run. The last wgmmas of a K block
are in flight when the next one starts, unless more warpgroups take stages in turn, which keep
tensor cores busy meanwhile.

These are no columns that wgmmas take together: those of A lie in an order in which they are. Of 128
columns, seen as (4, 2, 2, 4, 2), the second, third and fourth place come first: what lanes of the
first place have follows each other. The second place is missing where a stage has 64.

Where A has a scale for each row and K block, sums of a K block are multiplied by them, and added to
others: its last wgmmas finish while the first unit of the next one is widened.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from ..common.pipeline import Pipeline
from . import ptx
from .dequant import Rows, place
from .mixed_config import B_ROWS, Config

__all__ = ["Mainloop"]


class Mainloop:
    """Adds products of K blocks to a thread's accumulators. Its warpgroup has the tile's rows from
    ``row`` on; ``a``, ``a_scale``, ``b``, ``b_scale``: addresses in shared memory, the second one
    None where A has no scales."""

    def __init__(self, config: Config, pipeline: Pipeline, row, thread, a, a_scale, b, b_scale):
        self.config, self.pipeline = config, pipeline
        self.count = config.rows // 2  # of a thread's accumulators
        own, part = row + thread // 32 * 16 + thread % 32 // 4, thread % 4
        self.b = ptx.pin(b + place(own, part, config.row_bytes))
        scale_row = config.scale_row // config.stages_per_scale_row
        self.b_scale = ptx.pin(b_scale + own * config.scale_row + part * scale_row // 4)
        self.a = cute.arch.make_warp_uniform(ptx.wgmma_descriptor(a))
        if config.promotes:
            self.a_scale = ptx.pin(a_scale + part * 8)
            self.block = self.accumulators()
        self.units = config.block_k // 64
        self.rows = Rows(config.format, 1, self.units)
        self.next = cute.make_rmem_tensor((16 + self.rows.kept,), Int32)

    def accumulators(self):
        return cute.make_rmem_tensor((self.count,), Float32)

    @cute.jit
    def __call__(self, acc, k_blocks, stage, phase):
        """Add ``k_blocks``, one at least, to ``acc``: of this ``stage``, and of later ones.
        The next stage, and its phase."""
        stage, phase = (cute.arch.make_warp_uniform(each) for each in (stage, phase))
        self.rows.seen.fill(0)
        if const_expr(self.config.promotes):
            self.block.fill(0.0)
        self.pipeline.consumer_wait(stage, phase)
        words, scales = self.load(stage, 0), self.read_scales(stage, 0)
        self.keep(self.rows.widen(words, scales, 0, 0), scales)
        used = Int32(0)
        for i in range(k_blocks - 1):
            used, stage, phase = self.body(acc, used, i, False, stage, phase)
        first = stage
        last, stage, phase = self.body(acc, used, k_blocks - 1, True, stage, phase)
        if const_expr(not self.config.promotes):
            self.finish(acc)
        if const_expr(self.config.warpgroup_split_k == 1):
            if const_expr(self.units == 1):
                self.free(first)
            self.free(last)
        self.rows.poison([acc])
        return stage, phase

    def finish(self, acc) -> None:
        """Until all wgmmas have finished."""
        values = ptx.wgmma_wait_all([acc[i] for i in range(self.count)])
        for i, value in enumerate(values):
            acc[i] = value

    @cute.jit
    def body(self, acc, used, block, last: cutlass.Constexpr, stage, phase):
        """The ``block``-th K block, whose first unit is widened; or the ``last`` one. Where its own
        last wgmmas are in flight at its end, the stage that they read is ``used`` until the first
        ones of the next K block are. Both units are of one stage, or each of its own. The last
        stage, the next one, and its phase.
        """
        sums = self.block if self.config.promotes else acc
        fragments = [self.next[i] for i in range(16)]
        scales = [self.next[16 + i] for i in range(self.rows.kept)]
        first, half = stage, self.units - 1
        if const_expr(self.units == 1):
            stage, phase = self.pipeline.consumer_next(stage, phase)
            self.pipeline.consumer_wait(stage, phase)
            scales = self.read_scales(stage, 1)
        words = self.load(stage, half)
        self.products(sums, first, 0, fragments, keeps=not self.config.promotes)
        ptx.wgmma_wait_group(1)  # of the unit before: its registers are free
        if const_expr(self.config.warpgroup_split_k == 1):
            self.free(used, block)
        fragments = self.rows.widen(words, scales, 0, half)
        self.products(sums, stage, half, fragments)
        if const_expr(self.config.warpgroup_split_k > 1):
            ptx.wgmma_wait_group(0)
            self.free(stage)
        used, factors = stage, self.a_scales(stage)
        stage, phase = self.pipeline.consumer_next(stage, phase)
        if const_expr(not last):
            self.pipeline.consumer_wait(stage, phase)
            words, scales = self.load(stage, 0), self.read_scales(stage, 0)
            ptx.wgmma_wait_group(1)
            if const_expr(self.units == 1):
                self.free(first)
            self.keep(self.rows.widen(words, scales, 0, 0), scales)
        self.promote(acc, factors)
        return used, stage, phase

    def a_scales(self, stage) -> list:
        """For the columns of a thread's accumulators, of which it has pairs; where A has them."""
        if not self.config.promotes:
            return []
        address = self.a_scale + stage * self.config.a_scale_bytes
        return [ptx.ld_shared(address, 4 * i, 2) for i in range(0, self.config.rows, 8)]

    def promote(self, acc, factors: list) -> None:
        """Add sums of the K block times ``factors``, if there are any."""
        if factors:
            self.finish(self.block)
        for i, pair in enumerate(factors):  # two rows of B by two of A
            where = range(4 * i, 4 * i + 4)
            sums = ptx.fma4([acc[j] for j in where], [self.block[j] for j in where], 2 * pair)
            for j, value in zip(where, sums, strict=True):
                acc[j] = value

    def free(self, stage, wanted=1) -> None:
        """Arrive when a stage has been read, unless ``wanted`` is 0: each thread by itself, which
        takes no longer than one for its warp, and which tools that look for races follow."""
        ptx.mbarrier_arrive_if(wanted, (self.pipeline.empty + stage).toint())

    def keep(self, fragments: list, scales: list) -> None:
        """The first unit of the next K block, and its scales."""
        for i, each in enumerate(fragments + scales):
            self.next[i] = each

    def load(self, stage, half: int) -> list:
        """16 elements of one row, then of the other one, eight rows below."""
        nbytes = self.config.row_bytes
        address = self.b + stage * (B_ROWS * nbytes)
        if nbytes == 128:
            address, offset = address ^ (16 * half), 0
        else:
            offset = 8 * half
        words = 2 * self.rows.widener.words
        return [
            word
            for row in (0, 8)
            for word in ptx.ld_shared(address, row * nbytes + offset, words, Int32)
        ]

    def read_scales(self, stage, index: int) -> list:
        """For a thread's two rows; ``index``: of the stage among those of a K block."""
        config, nbytes = self.config, self.rows.scale_bytes
        address = self.b_scale + stage * config.scale_bytes
        first = (
            index % config.stages_per_scale_row * (config.scale_row // config.stages_per_scale_row)
        )
        offsets = first, first + 8 * config.scale_row
        return self.rows.factors(*(ptx.ld_shared_bytes(address, i, nbytes) for i in offsets))

    def products(self, acc, stage, half: int, fragments: list, keeps: bool = True) -> None:
        """Start the wgmmas of a unit, which add to ``acc``, or overwrite it."""
        b = self.a + (self.units * stage + half) * (self.config.rows * 8)
        values = ptx.wgmma_rs([acc[i] for i in range(self.count)], fragments, b, keeps)
        for i, value in enumerate(values):
            acc[i] = value
