# mypy: ignore-errors
"""bf16 times MXFP8, MXFP4 and NVFP4, which are dequantized to bf16 in registers.

A CTA has a warp that loads tiles by TMA (``Loader``), three that load block scales
(``ScaleLoader``), and consumer warpgroups that dequantize B, multiply (``mixed_mainloop``) and
store (``mixed_epilogue``). CTAs are persistent; a tile is rows of A and of B. CTAs of a cluster
each take a part of K, and so may warpgroups of a CTA, which take stages in turn
(``mixed_reduce``); or all CTAs take equal shares of all K blocks (``stream_scheduler``).

A has been permuted, and dequantized, by a kernel that this one follows: while it runs, B's first
stages are brought as near as the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ..common import shared
from ..common.copies import Copies, TmaTiles
from ..common.numeric import NUMERIC
from ..common.pdl import pdl_wait
from ..common.persistent import cluster_shape, cluster_sync
from ..common.pipeline import Pipeline
from ..common.tensor_specs import any_tensor
from ..common.tile_ring import TileRing
from . import ptx
from .column_scheduler import ColumnScheduler, ColumnTiles
from .grouped_scheduler import GroupedScheduler, TileFinder
from .kernel import gemm_host_function
from .mixed_config import B_ROWS, BLOCK_K, WARPGROUPS, Config
from .mixed_epilogue import MixedEpilogue
from .mixed_mainloop import Mainloop
from .mixed_reduce import MixedReduce
from .stream_reduce import StreamReduce

__all__ = ["MixedGemm", "host_function"]

# of threads that load, and of those that multiply, as many as there are for such warpgroups
_REGISTERS = {1: (40, 232), 2: (32, 112)}
_PANEL = 64  # columns of A in rows of 128 bytes


class MixedGemm:
    """The kernel of a :class:`Config` and the host code that launches it."""

    def __init__(self, config: Config):
        self.config = config
        self.threads = 128 * (1 + WARPGROUPS * config.warpgroup_split_k)
        self.scheduler: Any = ColumnScheduler(config)
        if config.grouped:  # neighbours share rows of A, which are more bytes
            shape = config.rows, B_ROWS
            order = {"across_first": True, "rest_k_blocks": 1}
            self.scheduler = GroupedScheduler(shape, masked=config.grouping == "masked", **order)
        slots = config.stages * (config.block_k // _PANEL)
        self.a = Copies(cutlass.BFloat16, (config.rows, _PANEL), slots, rows=config.loaded_rows)
        self.b = Copies(cutlass.Uint8, (B_ROWS, config.row_bytes), config.stages)
        self.out = Copies(NUMERIC[config.out_dtype], (64, 64), config.own_shares)

    @cute.jit
    def __call__(
        self,
        a,
        a_scale,
        partials,
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
        """Launch. ``a`` (M, K) bf16, permuted and padded with zeros to whole K blocks; ``a_scale``
        fp32 (K blocks, M or more), or None; ``partials`` as ``StreamReduce`` takes them, its
        counters zero, or None; ``b`` (N, K) as bytes, ``b_scale`` (N, K / block); ``d`` (M, N);
        ``bias`` (N,) and ``alpha``, or None. Where rows are grouped, ``b`` and ``b_scale`` have
        groups * N rows, ``offsets`` (groups,) int32, and ``supergroup`` as of ``GroupedTiles``;
        else None.
        """
        config = self.config
        loads = [self.a.describe(a), self.b.describe(b)]
        store = None, None
        if const_expr(config.tma_store):
            store = self.out.describe(d, cpasync.CopyBulkTensorTileS2GOp())
        groups = (offsets, supergroup) if config.grouped else None
        extent = d if config.grouped else self.scheduler.extent(a, b)
        atoms, views = zip(*loads, strict=True)
        output = d, bias, alpha, partials
        k_blocks = cute.ceil_div(b.shape[1], config.stages_per_k_block * config.row_bytes)
        work = extent, k_blocks, groups
        self.kernel(atoms, views, *store, (a_scale, b_scale), output, work).launch(
            grid=(self.scheduler.grid(extent, multiprocessors, groups), 1, 1),
            block=(self.threads, 1, 1),
            cluster=cluster_shape(config.split_k),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, atoms, views, store_atom, store_view, scale, output, work):
        config = self.config
        *output, partials = output
        extent, k_blocks, groups = work
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        k_part = Int32(0)
        if const_expr(config.split_k > 1):
            k_part = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        # shared memory
        memory = cutlass.memory.SmemAllocator()
        copies = self.a, self.b
        tiles = [each.allocate(memory) for each in copies]
        a, b = (TmaTiles(*each) for each in zip(copies, atoms, views, tiles, strict=True))
        boxes = None
        if const_expr(config.tma_store):
            boxes = TmaTiles(self.out, store_atom, store_view, self.out.allocate(memory))
        scales: Any = [
            shared.allocate(memory, config.stages * nbytes, 128) if nbytes else None
            for nbytes in (config.a_scale_bytes, config.scale_bytes)
        ]
        pipeline = Pipeline.allocate(memory, config.stages, config.warpgroup_split_k)
        ring = TileRing.allocate(memory) if config.grouped else None
        reduce = StreamReduce(config, partials) if config.stream_k else None
        if const_expr(config.sources > 1):
            reduce = MixedReduce.allocate(config, memory)

        # barriers
        if warp == 0:
            for atom in [*atoms, *([store_atom] if config.tma_store else [])]:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in range_constexpr(pipeline.full_barriers):
                    cute.arch.mbarrier_init(pipeline.full + i, 1 + config.scale_threads)
                for i in range_constexpr(config.stages):
                    cute.arch.mbarrier_init(pipeline.empty + i, 128 * WARPGROUPS)
                if const_expr(config.sources > 1):
                    reduce.init_barriers()
                if const_expr(config.grouped):
                    ring.init_barriers(1 + config.scale_threads // 32 + 4 * WARPGROUPS)
            cute.arch.mbarrier_init_fence()
        a.copies.clear(a.tiles, self.threads)
        cluster_sync(config.split_k)

        # roles
        schedule = self.scheduler.tiles(extent, k_blocks, Int32(0), k_part, groups, ring)
        few, many = _REGISTERS[config.warpgroup_split_k]
        if warp < 4:
            cute.arch.setmaxregister_decrease(few)
            if warp == 0:
                Loader(config, pipeline, schedule, a, b)()
            elif warp <= config.scale_threads // 32:
                ScaleLoader(config, pipeline, schedule, *scale, *scales)()
            elif const_expr(config.grouped):
                pdl_wait()
                TileFinder(schedule)()
        else:
            cute.arch.setmaxregister_increase(many)
            epilogue = MixedEpilogue(config, boxes, *output)
            addresses = a.address, scales[0], b.address, scales[1]
            Consumer(config, pipeline, schedule, k_part, addresses, epilogue, reduce)()


@dataclass(frozen=True)
class Loader:
    """Keeps the stages filled with tiles of A and B: the first warp."""

    config: Config
    pipeline: Pipeline
    schedule: ColumnTiles
    a: TmaTiles
    b: TmaTiles

    @cute.jit
    def __call__(self):
        config, row_bytes = self.config, self.config.row_bytes
        turns, panels = config.stages_per_k_block, config.block_k // _PANEL
        nbytes = panels * self.a.copies.moved + self.b.copies.moved
        lane = cute.arch.lane_idx()
        start, step = self.schedule.first()
        if const_expr(not config.grouped):  # groups may come from the kernel before
            near = self.schedule.tile(start)
            with cute.arch.elect_one():
                begin, end = near.k_begin * turns, near.k_end * turns
                for i in range(begin, cutlass.min(end, begin + config.stages)):
                    self.b.prefetch((near.b_row, i * row_bytes))
        pdl_wait()
        stage, phase = Int32(0), Int32(1)
        for index in range(start, self.schedule.count, step):
            tile = self.schedule.tile(index)
            for i in range(tile.k_begin * turns, tile.k_end * turns):
                self.pipeline.producer_acquire(stage, phase)
                barrier = self.pipeline.producer_barrier(stage, phase)
                if lane == 0:
                    ptx.mbarrier_arrive_expect_tx(barrier.toint(), nbytes)
                self.b.load(stage, (tile.b_row, i * row_bytes), barrier)
                for j in range_constexpr(panels):
                    column = (i * panels + j) * _PANEL
                    self.a.load(stage * panels + j, (tile.a_row, column), barrier)
                stage, phase = self.pipeline.producer_next(stage, phase)


@dataclass(frozen=True)
class ScaleLoader:
    """Brings block scales of B (N, K / block) to the stages, at ``b_address``, and those of A
    (K blocks, M), if it has them: two or three warps."""

    config: Config
    pipeline: Pipeline
    schedule: ColumnTiles
    a_scale: Any
    b_scale: Any
    a_address: Any
    b_address: Any

    @cute.jit
    def __call__(self):
        thread = cute.arch.thread_idx()[0] - 32
        start, step = self.schedule.first()
        stage, phase = Int32(0), Int32(1)
        if const_expr(not self.config.grouped):
            near = self.schedule.tile(start)
            self.prefetch(near.b_row, near.k_begin, thread)
        pdl_wait()
        for index in range(start, self.schedule.count, step):
            tile = self.schedule.tile(index)
            turns = self.config.stages_per_k_block
            for i in range(tile.k_begin * turns, tile.k_end * turns):
                self.pipeline.producer_acquire(stage, phase)
                target = self.b_address + stage * self.config.scale_bytes
                self.load(target, tile.b_row, i // self.config.stages_per_scale_row, thread)
                if const_expr(self.config.promotes):
                    target = self.a_address + stage * self.config.a_scale_bytes
                    self.load_a(target, tile.a_row, i, thread)
                self.arrive(self.pipeline.producer_barrier(stage, phase).toint())
                stage, phase = self.pipeline.producer_next(stage, phase)

    @cute.jit
    def load(self, target, first, index, thread):
        """A tile's rows from ``first`` on, the ``index``-th part of each; zeros outside of
        ``b_scale``."""
        nbytes, scale = self.config.scale_row, self.b_scale
        column = index * nbytes
        for i in range_constexpr(-(-B_ROWS // self.config.scale_threads)):
            row = i * self.config.scale_threads + thread
            if row < B_ROWS:
                inside = Int32(first + row < scale.shape[0])
                own = target + row * nbytes
                at = (first + row) * inside
                if const_expr(self.config.async_scales):
                    source = scale.iterator.toint() + scale.layout((at, column))
                    ptx.cp_async(own, source, nbytes, inside)
                else:
                    for j in range_constexpr(nbytes):
                        value = Int32(0)
                        if inside == 1 and column + j < scale.shape[1]:
                            value = Int32(scale[at, column + j])
                        ptx.st_shared_byte(own + j, value)

    @cute.jit
    def load_a(self, target, first, k_block, thread):
        """Scales of a tile's rows from ``first`` on; zeros after the last one."""
        scale, threads = self.a_scale, self.config.scale_threads
        for i in range_constexpr(-(-self.config.rows // threads)):
            row = i * threads + thread
            if row < self.config.rows:
                inside = Int32(first + row < scale.shape[1])
                at = k_block, (first + row) * inside
                if const_expr(self.config.async_scales):
                    source = scale.iterator.toint() + scale.layout(at) * 4
                    ptx.cp_async(target + row * 4, source, 4, inside)
                else:
                    value = Float32(0.0)
                    if inside == 1:
                        value = scale[at]
                    ptx.st_shared(target + row * 4, [value])

    @cute.jit
    def prefetch(self, first, k_block, thread):
        """Bring scales of the same rows, of this K block and some after it, to the L2 cache."""
        scale = self.b_scale
        for i in range_constexpr(-(-B_ROWS // self.config.scale_threads)):
            row = i * self.config.scale_threads + thread
            if row < B_ROWS and first + row < scale.shape[0]:
                column = k_block * (BLOCK_K // self.config.format.block_size)
                place = scale.layout((first + row, column))
                ptx.prefetch_l2(scale.iterator.toint() + place)

    def arrive(self, barrier) -> None:
        if self.config.async_scales:
            ptx.cp_async_mbarrier_arrive(barrier)
        else:
            ptx.mbarrier_arrive(barrier)


class Consumer:
    """Multiplies and stores: a warpgroup.

    ``k_part``: of this CTA, where those of a cluster split K; ``addresses``: of A and B, each with
    that of its scales; ``reduce``: adds up what warpgroups have that split K, if they do.
    """

    def __init__(self, config, pipeline, schedule, k_part, addresses, epilogue, reduce):
        self.config, self.schedule, self.k_part = config, schedule, k_part
        self.epilogue, self.reduce = epilogue, reduce
        thread = cute.arch.thread_idx()[0] - 128
        self.warpgroup = cute.arch.make_warp_uniform(thread // 128)
        self.thread = ptx.pin(thread % 128)
        row = self.warpgroup % WARPGROUPS * 64
        self.mainloop = Mainloop(config, pipeline, row, self.thread, *addresses)

    @cute.jit
    def __call__(self):
        config, parts = self.config, self.config.warpgroup_split_k
        thread, warpgroup = self.thread, self.warpgroup
        start, step = self.schedule.first()
        before = warpgroup // WARPGROUPS  # stages that others take first
        stage, phase = before, Int32(0)
        reduce_phase = Int32(0)
        acc = self.mainloop.accumulators()
        pdl_wait()
        for index in range(start, self.schedule.count, step):
            acc.fill(0.0)
            count = self.schedule.k_blocks(index)
            if const_expr(parts > 1):
                k_blocks = count
                count = (k_blocks - before + parts - 1) // parts
                before = (before - k_blocks) & (parts - 1)
            stage, phase = self.mainloop(acc, count, stage, phase)
            # in the loop, so that what follows is not computed before it, and kept
            warpgroup = cute.arch.make_warp_uniform(ptx.pin(warpgroup))
            share, turn = warpgroup % WARPGROUPS, warpgroup // WARPGROUPS
            here = ptx.pin(thread)
            tile = self.schedule.tile(index)
            column = tile.column + share * 64
            if const_expr(config.stream_k):
                cta = self.schedule.cta
                if tile.k_begin > 0:
                    self.reduce.send(share, acc, here, cta)
                else:
                    self.reduce.receive(share, acc, here, cta + 1, self.schedule.last(index))
                    self.epilogue(acc, share, here, tile.row, column)
            elif const_expr(config.sources > 1):
                if turn == 0 and self.k_part == share % config.split_k:
                    more = index + step < self.schedule.count
                    self.reduce.receive(share, acc, here, reduce_phase, more)
                    self.epilogue(acc, share, here, tile.row, column)
                else:
                    self.reduce.send(share, acc, here, reduce_phase, self.k_part, turn)
            else:
                if const_expr(config.grouped):  # noqa: SIM102 - one is known when compiling
                    if tile.group == self.schedule.groups:  # the rest
                        acc.fill(0.0)
                self.epilogue(acc, share, here, tile.row, column, tile.end, tile.group)
            reduce_phase = reduce_phase ^ 1
        if const_expr(config.tma_store):
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def host_function(config: Config):
    """The host function of a kernel, which takes tensors of any shape."""
    align = config.scale_row if config.async_scales else 1
    return gemm_host_function(
        MixedGemm(config),
        any_tensor(cutlass.BFloat16, 2, 16, True),
        any_tensor(cutlass.Float32, 2, 4) if config.promotes else None,
        any_tensor(cutlass.Int32, 1, 16) if config.stream_k else None,
        any_tensor(cutlass.Uint8, 2, 16, True),
        any_tensor(cutlass.Uint8, 2, align, True),
    )
