# mypy: ignore-errors
"""FP8 with fp32 scales per 128 along K: A (M, K) 1 x 128, B (N, K) 128 x 128 or 1 x 128.

What ``kernel`` wants to know: what is loaded, and the mainloop. Scales are loaded beside the tiles;
128 x 128 ones of B are fetched by a second warp. The products of a K block are a partial
accumulator, which is scaled in registers as it is added: while a warpgroup adds, the other one
keeps the tensor cores busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice, tee
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr

from ..common.copies import Copies
from ..common.pipeline import Pipeline
from ..common.promotion import promote_l2
from ..common.tensor_specs import any_strided, any_tensor
from . import ptx
from .config import BLOCK_K, Config
from .dense_scheduler import DenseTiles
from .kernel import Gemm, Operand, accumulators, gemm_host_function

__all__ = ["Fp8Gemm", "first_scale", "host_function"]

_COLUMNS = 8  # of a wgmma's result, of which a thread has two, in two rows
_AHEAD = 5  # pairs of scales that are read before they are needed: there are registers for so many


class Fp8Gemm:
    """The kernel of a :class:`Config` and the host code that launches it."""

    def __init__(self, config: Config):
        (rows, columns), stages, (down, across) = config.tile, config.stages, config.cluster
        a = Copies(cutlass.Uint8, (rows, BLOCK_K), stages, rows=config.loaded_rows, shares=across)
        b = Copies(cutlass.Uint8, (columns, BLOCK_K), stages, shares=down)
        slot = config.scale_bytes[0] // 4
        a_scale = Copies(Float32, (1, slot), stages, columns=config.a_scales, swizzled=False)
        b_scale = Copies(Float32, (1, columns), stages, swizzled=False)
        operands = (
            Operand(a, lambda tile, k_block: (tile.a_row, k_block * BLOCK_K)),
            Operand(b, lambda tile, k_block: (tile.b_row, k_block * BLOCK_K)),
            Operand(a_scale, lambda tile, k_block: (k_block, first_scale(config, tile))),
            Operand(b_scale, lambda tile, k_block: (k_block, tile.column)),
        )
        self.config = config
        if config.b_block[0] == 1:
            self.gemm = Gemm(config, operands, Mainloop)
        else:
            self.gemm = Gemm(config, operands[:3], Mainloop, ScaleFetcher, config.scale_bytes[1])

    @cute.jit
    def __call__(
        self,
        a,
        a_scale,
        b,
        b_scale,
        d,
        bias,
        alpha,
        offsets,
        supergroup,
        multiprocessors,
        stream,
    ):
        """Launch. ``a`` (M, K) and ``b`` (N, K) as bytes; ``a_scale`` (K / 128, M padded to 4);
        ``b_scale`` (N / 128, K / 128), or as that of A; ``d`` (M, N); ``bias`` (N,), ``alpha``, or
        None. Where rows are grouped, ``b`` is (groups * N, K) and ``b_scale`` (groups, N / 128, K /
        128); where columns are, ``d`` is (groups * M, N). Then ``offsets`` (groups,) int32, and
        ``supergroup`` as of ``GroupedTiles``; else None.
        """
        operands = zip(self.gemm.operands, (a, b, a_scale, b_scale), strict=False)
        loads = [operand.copies.describe(tensor) for operand, tensor in operands]
        loads[:2] = [(promote_l2(atom), view) for atom, view in loads[:2]]
        k_blocks = cute.ceil_div(a.shape[1], BLOCK_K)
        groups = (offsets, supergroup) if self.config.grouped else None
        rest = k_blocks, groups, multiprocessors, stream
        self.gemm.launch(loads, b_scale, (d, bias, alpha), *rest)


def first_scale(config: Config, tile):
    """Of A, that is loaded for a tile: TMA wants multiples of 16 bytes."""
    return tile.a_row // 4 * 4 if config.rows_grouped else tile.a_row


@dataclass(frozen=True)
class ScaleFetcher:
    """Brings 128 x 128 scales of B, ``b_scale``, to the stages, at ``address``: a warp.

    A lane has those of every 32nd K block, read long before a stage is free for them.
    """

    config: Config
    pipeline: Pipeline
    schedule: DenseTiles
    b_scale: Any
    address: Any

    @cute.jit
    def __call__(self):
        config = self.config
        lane = cute.arch.lane_idx()
        start, step = self.schedule.first()
        stage, phase = Int32(0), Int32(1)
        values = cute.make_rmem_tensor((config.b_scales,), Float32)
        for index in range(start, self.schedule.count, step):
            tile = self.schedule.tile(index)
            source = self.b_scale
            if const_expr(tile.group is not None):
                source = source[(cutlass.min(tile.group, source.shape[0] - 1), None, None)]
            for k_block in range(tile.k_begin, tile.k_end, 32):
                for i in range_constexpr(config.b_scales):
                    values[i] = Float32(0)
                    row = tile.column // 128 + i
                    if row < source.shape[0] and k_block + lane < tile.k_end:
                        values[i] = source[row, k_block + lane]
                for i in range(cutlass.min(tile.k_end - k_block, Int32(32))):
                    self.pipeline.producer_acquire(stage, phase)
                    if lane == i:
                        target = self.address + stage * config.b_scales_apart
                        for j in range_constexpr(config.b_scales):
                            ptx.st_shared(target + 4 * j, [values[j]])
                        ptx.mbarrier_arrive(self.pipeline.producer_barrier(stage, phase).toint())
                    stage, phase = self.pipeline.producer_next(stage, phase)


class Mainloop:
    """Adds products of K blocks to a warpgroup's accumulators, a wgmma's tile after the other.

    Takes the warpgroup's first row in the CTA's tile, and addresses in shared memory.
    """

    fills_registers = True

    def __init__(self, config: Config, pipeline: Pipeline, row, thread, a, b, a_scale, b_scale):
        self.config, self.pipeline = config, pipeline
        warp, self.lane = thread // 32, thread % 32
        self.a = cute.arch.make_warp_uniform(ptx.wgmma_descriptor(a + row * BLOCK_K))
        self.b = cute.arch.make_warp_uniform(ptx.wgmma_descriptor(b))
        self.a_scale = ptx.pin(a_scale + (row + warp * 16 + self.lane // 4) * 4)
        own = self.lane % 4 * 8 if config.b_block[0] == 1 else 0
        self.rank = Int32(0)  # of the CTA in its cluster: of the lanes, this one arrives for it
        if config.multicast_ctas > 1:
            self.rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        self.b_scale = ptx.pin(b_scale + own)
        self.partial_acc = accumulators(config)

    @cute.jit
    def __call__(self, acc, tile, k_blocks, stage, phase):
        """Add ``k_blocks`` of a tile to ``acc``; the next stage and phase."""
        unroll = self.config.unroll
        self.column = ptx.pin(tile.column % 128)  # of a block
        self.a_scale_of_tile = self.a_scale
        if const_expr(self.config.rows_grouped):
            self.a_scale_of_tile = ptx.pin(self.a_scale + tile.a_row % 4 * 4)
        if k_blocks > 0:
            self.pipeline.consumer_wait(stage, phase)
        whole = k_blocks // unroll
        for i in range(whole):
            more = (i + 1) * unroll < k_blocks
            stage, phase = self.body(acc, unroll, more, stage, phase)
        if const_expr(unroll > 1):
            for i in range(whole * unroll, k_blocks):
                stage, phase = self.body(acc, 1, i + 1 < k_blocks, stage, phase)
        return stage, phase

    @cute.jit
    def body(self, acc, count, more, stage, phase):
        """``count`` K blocks, the first of which is there. No wgmma is in flight at its ends: else
        the compiler would wait for each of them.
        """
        mma_tiles = self.config.mma_tiles
        for k_block in range_constexpr(count):
            here, rows, pairs = stage, None, {}
            for i in range_constexpr(len(mma_tiles)):
                row_step, column_step = mma_tiles[i]
                last = i == len(mma_tiles) - 1
                self.mma(here, row_step, column_step)
                if const_expr(i == 0):
                    rows = self.row_scales(here)
                scales = self.scales(here, row_step, column_step, rows, pairs)
                if const_expr(last):
                    stage, phase = self.pipeline.consumer_next(stage, phase)
                    if const_expr(k_block < count - 1):
                        self.pipeline.consumer_wait(stage, phase)
                    else:
                        if more:
                            self.pipeline.consumer_wait(stage, phase)
                ptx.wgmma_wait_group(0)
                self.promote(acc[i], scales, here if last else None)
        return stage, phase

    def mma(self, stage, row_step: int, column_step: int) -> None:
        """Start the wgmmas of a partial accumulator."""
        config, partial_acc = self.config, self.partial_acc
        unit = BLOCK_K // 16  # of a descriptor, for a row
        a = self.a + stage * (config.tile[0] * unit) + row_step * 64 * unit
        b = self.b + stage * (config.tile[1] * unit) + column_step * config.mma_n * unit
        given = [partial_acc[i] for i in range(config.mma_n // 2)]
        for i, value in enumerate(ptx.wgmma_fp8(given, a, b)):
            partial_acc[i] = value
        if not config.warpgroup_split_k:  # few columns end before what is read then is there
            ptx.bar_warp_sync()

    def row_scales(self, stage) -> list[list[Any]]:
        """Of A, two for each step down the rows."""
        address = self.a_scale_of_tile + stage * self.config.scale_bytes[0]
        return [
            [ptx.ld_shared(address, 256 * step + offset)[0] for offset in (0, 32)]
            for step in range(self.config.row_steps)
        ]

    def scales(
        self, stage, row_step: int, column_step: int, rows: list, pairs: dict
    ) -> Iterator[list]:
        """For each eight columns of a wgmma: what a thread's two rows are scaled by, or its four
        values. Some of B's scales are read at once, while the tensor cores work; the others as they
        are needed. All steps down the ``rows`` have those that are read in the first one:
        ``pairs``, of a stage.
        """
        config = self.config
        first = column_step * config.mma_n
        address = self.b_scale + stage * config.b_scales_apart
        columns = range(first, first + config.mma_n, _COLUMNS)
        if config.b_block[0] == 1:
            if row_step == 0:
                read = _ahead(ptx.ld_shared(address, 4 * column, 2) for column in columns)
                pairs[column_step] = tee(read, config.row_steps)
            here, own = pairs[column_step][row_step], rows[row_step]
            return ([ptx.mul(row, each) for row in own for each in pair] for pair in here)
        # Read again in each step: with few rows, the first wgmmas would wait for all of it.
        found = [
            ptx.ld_shared_broadcast(address, 4 * i, self.lane, self.rank)
            for i in range(config.b_scales)
        ]
        return self.block_scales(rows[row_step], found, columns)

    def block_scales(self, rows: list, found: list, columns: range) -> Iterator[list]:
        """The same of 128 x 128 scales, ``found`` for the blocks that the tile may reach into:
        which block a segment of columns is in depends on where the tile begins."""
        segment = self.config.segment
        scaled = [[ptx.mul(row, each) for row in rows] for each in found]
        for at, alike in groupby(column // segment for column in columns):
            scales = scaled[0]
            for block in range(1, len(scaled)):
                least = 128 * block - at * segment  # of where the tile begins in its first block
                if least <= 0:
                    scales = scaled[block]
                elif least <= 128 - segment:
                    scales = ptx.select_ge(self.column, least, scaled[block], scales)
            for _ in alike:
                yield scales

    def promote(self, acc, scales: Iterator[list], release) -> None:
        """Scale the partial accumulator and add it. ``release``: the stage, if it is not needed
        after this."""
        early = self.config.b_block[0] > 1 or self.config.row_steps > 1  # nothing more is read
        if release is not None and early:
            self.release(release)
        for group, each in enumerate(scales):
            where = range(4 * group, 4 * group + 4)
            partial_acc = [self.partial_acc[i] for i in where]
            added = ptx.fma4([acc[i] for i in where], partial_acc, each)
            for i, value in zip(where, added, strict=True):
                acc[i] = value
        if release is not None and not early:
            self.release(release)

    def release(self, stage) -> None:
        """Called by whole warps: one lane arrives for what all of them have read. What TMA writes
        there next overtakes reads that have no result yet, as an arrival does not wait for them."""
        cute.arch.fence_acq_rel_cta()
        cute.arch.sync_warp()
        barrier = (self.pipeline.empty + stage).toint()
        ptx.mbarrier_arrive_cluster(barrier, self.lane, self.config.multicast_ctas)


def _ahead(items: Iterator[Any]) -> Iterator[Any]:
    """The items, of which some are made before they are asked for; the first ones at once."""
    made = deque(islice(items, _AHEAD))

    def rest():
        while made:
            made.extend(islice(items, 1))
            yield made.popleft()

    return rest()


def host_function(config: Config):
    """The host function of a kernel, which takes tensors of any shape."""

    grouped = bool(config.grouped)

    def scales():
        return any_tensor(Float32, 2, 16, True)

    return gemm_host_function(
        Fp8Gemm(config),
        any_tensor(cutlass.Uint8, 2, 16, True),
        scales(),
        any_tensor(cutlass.Uint8, 2, 16, True),
        scales() if config.b_block[0] == 1 else any_strided(Float32, 2 + grouped, 4),
    )
