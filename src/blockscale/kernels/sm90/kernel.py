# mypy: ignore-errors
"""A product on Hopper: what FP8 (``fp8_gemm``) and bf16 (``bf16_gemm``) have in common.

A CTA has a producer warp that keeps stages filled by TMA (``Loader``), perhaps a warp that fetches
what TMA cannot (``fetcher``), and consumer warpgroups (``Consumer``), whose mainloop adds products
up in registers and whose epilogue stores them. CTAs are persistent: they take tiles from a
scheduler until there are none. In a cluster, each of two CTAs loads half of what both of them need.
Where tiles are few, each of two warpgroups takes every other K block, perhaps of the part of K that
its CTA of a cluster has (``split_k_reduce``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ...formats import GROUP_TILE
from ..common import shared
from ..common.copies import Copies, TmaTiles
from ..common.factor import any_added
from ..common.numeric import NUMERIC
from ..common.pdl import pdl_wait
from ..common.persistent import cluster_shape, cluster_sync
from ..common.pipeline import Pipeline
from ..common.tensor_specs import HostFunction, any_source, any_tensor
from ..common.tile_ring import TileRing
from . import ptx
from .dense_scheduler import DenseScheduler, DenseTiles
from .epilogue import Epilogue
from .grouped_scheduler import GroupedScheduler, TileFinder
from .k_grouped_tiles import KGroupedTiles
from .product_config import ProductConfig
from .split_k_reduce import ClusterReduce, CtaReduce, Room

__all__ = ["Gemm", "Operand", "accumulators", "gemm_host_function"]


@dataclass(frozen=True)
class Operand:
    """What TMA loads for a stage. ``origin``: its first element, of a tile and a K block."""

    copies: Copies
    origin: Callable[..., tuple]


@dataclass(frozen=True)
class Gemm:
    """The kernel of a product, and its launch.

    Attributes:
        operands: of a stage: tiles of A and of B, then others.
        mainloop: its class, as ``fp8_gemm.Mainloop``.
        fetcher: the class of what the second warp does, as ``fp8_gemm.ScaleFetcher``, if it does
            anything; ``fetched_bytes``: room for that in a stage, or 0 if it is behind what is
            loaded of the last operand.
    """

    config: ProductConfig
    operands: tuple[Operand, ...]
    mainloop: type
    fetcher: type | None = None
    fetched_bytes: int = 0

    #: Whether warps write to other ranks, by :meth:`send`.
    sends = False

    def load(self, pipeline, schedule, loads) -> None:
        """The work of the producer warp; ``loads`` are of the operands."""
        Loader(self.config, pipeline, schedule, self.operands, loads)()

    @property
    def scheduler(self):
        """Tells what tiles a CTA takes."""
        config = self.config
        if config.rows_grouped:
            return GroupedScheduler(config.tile, masked=config.grouping == "masked")
        if config.grouped:
            options = {
                "cluster": config.cluster,
                "skips_empty": config.accumulate,
                "blocks": GROUP_TILE // config.block_k,
            }
            return GroupedScheduler(config.tile, KGroupedTiles, **options)
        return DenseScheduler(config)

    @property
    def out(self) -> Copies:
        """Boxes of the output."""
        config = self.config
        slots = config.epilogue_stages * config.row_warpgroups
        return Copies(NUMERIC[config.out_dtype], (64, config.box_columns), slots)

    def launch(self, loads, fetched, output, k_blocks, groups, multiprocessors, stream) -> None:
        """Launch. ``loads``: atom and view of each operand. ``fetched``: what the fetcher reads.
        ``output``: ``d`` (M, N), ``bias`` (N,) and ``alpha``, or None. ``groups``, if there are
        any: their ends, and their supergroup.
        """
        config, d = self.config, output[0]
        store = None, None
        if config.stores_tiles:
            op = cpasync.CopyBulkTensorTileS2GOp()
            if config.reduces:
                op = cpasync.CopyReduceBulkTensorTileS2GOp()
            store = self.out.describe(d, op)
        atoms, views = zip(*loads, strict=True)
        self.kernel(atoms, views, *store, fetched, output, k_blocks, groups).launch(
            grid=(self.scheduler.grid(d, multiprocessors, groups), 1, 1),
            block=(config.threads, 1, 1),
            cluster=cluster_shape(config.cluster_size),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, atoms, views, store_atom, store_view, fetched, output, k_blocks, groups):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank, k_part = Int32(0), Int32(0)
        if const_expr(config.multicast_ctas > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if const_expr(config.split_k > 1):
            k_part = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        # shared memory
        memory = cutlass.memory.SmemAllocator()
        copies = [each.copies for each in self.operands]
        tiles = [each.allocate(memory) for each in copies[:2]]
        boxes = None
        if const_expr(config.stores_tiles):
            boxes = TmaTiles(self.out, store_atom, store_view, self.out.allocate(memory))
        tiles += [each.allocate(memory) for each in copies[2:]]
        loads = [TmaTiles(*each) for each in zip(copies, atoms, views, tiles, strict=True)]
        addresses = [each.address for each in loads]
        if const_expr(self.fetcher is not None):
            if const_expr(self.fetched_bytes):
                addresses.append(shared.allocate(memory, config.stages * self.fetched_bytes, 128))
            else:
                addresses.append(addresses[-1] + loads[-1].copies.moved)
        pipeline = Pipeline.allocate(memory, config.stages, config.k_turns)
        room = ring = None
        if const_expr(config.warpgroup_split_k):
            room = Room.of_product(memory, config)
        if const_expr(config.grouped):
            ring = TileRing.allocate(memory)

        # barriers
        if warp == 0:
            for atom in [*atoms, *([store_atom] if config.stores_tiles else [])]:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in range_constexpr(pipeline.full_barriers):
                    producers = 1 + (self.fetcher is not None)
                    cute.arch.mbarrier_init(pipeline.full + i, producers)
                    if const_expr(i < config.stages):
                        consumer_warps = 4 * config.row_warpgroups * config.multicast_ctas
                        cute.arch.mbarrier_init(pipeline.empty + i, consumer_warps)
                if const_expr(config.grouped):
                    ring.init_barriers(1 + (self.fetcher is not None) + 4 * config.warpgroups)
                if const_expr(config.warpgroup_split_k):
                    # threads of the CTA; or bytes, and other CTAs
                    arrivals = (128, 128) if config.split_k == 1 else (1, config.split_k)
                    room.init_barriers(*arrivals)
            cute.arch.mbarrier_init_fence()
        if const_expr(config.split_k > 1):
            cute.arch.cluster_arrive_relaxed()  # others wait for it before they send accumulators
        for each in loads:
            each.copies.clear(each.tiles, config.threads)
        cluster_sync(config.multicast_ctas)
        pdl_wait()

        # roles
        given = k_blocks, rank, k_part, groups, ring
        schedule = self.scheduler.tiles(output[0], *given)
        low, high = config.registers
        if warp < 4:
            cute.arch.setmaxregister_decrease(low)
            if warp == 0:
                self.load(pipeline, schedule, loads)
            if const_expr(self.fetcher is not None):  # noqa: SIM102 - one is known when compiling
                if warp == 1:
                    self.fetcher(config, pipeline, schedule, fetched, addresses[-1])()
            if const_expr(config.grouped):  # noqa: SIM102
                if warp == 2:
                    TileFinder(schedule)()
            if const_expr(self.sends):  # noqa: SIM102
                if warp >= 2:
                    self.send(schedule, warp - 2)
            if const_expr(config.split_k > 1):
                cute.arch.cluster_wait()
        else:
            cute.arch.setmaxregister_increase(high)
            if const_expr(config.split_k > 1):
                cute.arch.cluster_wait()
            epilogue = Epilogue(config, boxes, *output, self.mainloop.fills_registers)
            consumer = config, pipeline, schedule, k_part, addresses
            Consumer(*consumer, self.mainloop, epilogue, room)()


@dataclass(frozen=True)
class Loader:
    """Keeps the stages filled: the producer warp. ``loads``: of each operand."""

    config: ProductConfig
    pipeline: Pipeline
    schedule: DenseTiles
    operands: tuple[Operand, ...]
    loads: list[TmaTiles]

    @cute.jit
    def __call__(self):
        nbytes = sum(each.copies.moved for each in self.loads)
        lane = cute.arch.lane_idx()
        start, step = self.schedule.first()
        stage, phase = Int32(0), Int32(1)
        for index in range(start, self.schedule.count, step):
            tile = self.schedule.tile(index)
            for k_block in range(tile.k_begin, tile.k_end):
                self.pipeline.producer_acquire(stage, phase)
                barrier = self.pipeline.producer_barrier(stage, phase)
                if lane == 0:
                    ptx.mbarrier_arrive_expect_tx(barrier.toint(), nbytes)
                for operand, load in zip(self.operands, self.loads, strict=True):
                    origin = operand.origin(tile, k_block)
                    load.load(stage, origin, barrier, self.schedule.rank)
                stage, phase = self.pipeline.producer_next(stage, phase)
        if const_expr(self.config.multicast_ctas > 1):  # stay until no other CTA signals any more
            for _ in range(self.config.stages):
                self.pipeline.producer_acquire(stage, phase)
                stage, phase = self.pipeline.producer_next(stage, phase)


class Consumer:
    """Multiplies and stores: a warpgroup.

    ``k_part``: of this CTA, where those of a cluster split K; ``addresses``: of the operands, and
    of what is fetched; ``room``: for accumulators of warpgroups that split K, if they do.
    """

    def __init__(self, config, pipeline, schedule, k_part, addresses, mainloop, epilogue, room):
        self.config, self.schedule, self.k_part, self.epilogue = config, schedule, k_part, epilogue
        thread = cute.arch.thread_idx()[0] - 128
        self.warpgroup = cute.arch.make_warp_uniform(thread // 128)
        self.thread = ptx.pin(thread % 128)
        self.k_turn = Int32(0)
        if config.warpgroup_split_k:  # this warpgroup's K blocks, its rows being all
            self.k_turn, self.warpgroup = self.warpgroup, Int32(0)
        self.first_row = self.warpgroup * (64 * config.row_steps)
        self.mainloop = mainloop(config, pipeline, self.first_row, self.thread, *addresses)
        if config.warpgroup_split_k:
            reduce = ClusterReduce if config.split_k > 1 else CtaReduce
            self.reduce = reduce(config, room, k_part, self.k_turn, self.thread)

    @cute.jit
    def __call__(self):
        config, k_turn, thread = self.config, self.k_turn, self.thread
        start, step = self.schedule.first()
        if const_expr(config.skew):
            ptx.nanosleep(self.warpgroup * config.skew)
        stage, phase, turn, taken = k_turn, Int32(0), Int32(0), Int32(0)
        acc = [accumulators(config) for _ in config.mma_tiles]
        for index in range(start, self.schedule.count, step):
            tile = self.schedule.tile(index)
            for each in acc:
                each.fill(0.0)
            count = tile.k_blocks
            if const_expr(config.warpgroup_split_k):
                taken = taken + tile.k_blocks
                count = (taken + 1 - k_turn) // 2 - (taken - tile.k_blocks + 1 - k_turn) // 2
            stage, phase = self.mainloop(acc, tile, count, stage, phase)
            row, column = tile.row + self.first_row, tile.column + self.k_part * config.own_columns
            place = row, column, tile.end, tile.group
            if const_expr(config.split_k > 1):
                filled = tile.row + thread // 32 * 16 < self.epilogue.d.shape[0]
                self.reduce.send(acc, turn, filled)
                if k_turn == 0:
                    more = index + step < self.schedule.count
                    self.reduce.receive(acc, turn, filled, more)
                    self.epilogue(acc, self.warpgroup, thread, *place)
            elif const_expr(config.warpgroup_split_k):
                if k_turn > 0:
                    self.reduce.send(acc, turn)
                else:
                    self.reduce.receive(acc, turn)
                    self.epilogue(acc, self.warpgroup, thread, *place)
            else:
                self.epilogue(acc, self.warpgroup, thread, *place)
            turn = turn ^ 1
        if const_expr(config.stores_tiles):
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def accumulators(config: ProductConfig):
    """A thread's, of one wgmma."""
    acc = cute.make_rmem_tensor((config.mma_n // 2,), Float32)
    acc.fill(0.0)
    return acc


def gemm_host_function(gemm, *operands):
    """The host function of a kernel, which takes tensors of any shape: ``operands``, the output,
    bias, alpha, what tells groups, and how many multiprocessors there are."""
    config = gemm.config
    groups = (any_tensor(Int32, 1, 4), Int32(1)) if config.grouped else (None, None)
    return HostFunction(
        config.arch,
        gemm,
        *operands,
        any_source(config.out_dtype, config.tma_store),
        *any_added(config),
        *groups,
        Int32(1),
    )
