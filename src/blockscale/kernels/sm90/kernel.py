# mypy: ignore-errors
"""FP8 with fp32 scales per 128 along K: A (M, K) 1 x 128, B (N, K) 128 x 128 or 1 x 128.

A block of threads has a warp that loads tiles by TMA, one that fetches the scales of B, and
warpgroups that multiply (``mainloop``) and store (``epilogue``). Blocks stay until all tiles are
done (``schedule``). In a cluster, each of two blocks loads half of what both of them need. Where
tiles are few, each of two warpgroups takes every other K block (``exchange``).
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ..common.copies import Copies
from ..common.promotion import promote_l2
from ..common.schedule import Raster
from ..gpu.any_tensor import any_matrix, any_source, any_tensor, compile_for
from ..gpu.tile import NUMERIC
from . import ptx
from .config import BLOCK_K, Config
from .epilogue import Epilogue
from .exchange import Exchange
from .mainloop import Mainloop

__all__ = ["Gemm", "compile_config"]


class Gemm:
    """The kernel of a :class:`Config` and the host code that launches it."""

    def __init__(self, config: Config):
        self.config = config
        self.raster = Raster(config.tile, config.cluster, config.group)

    def setup(self):
        """What needs a compiler that runs."""
        config = self.config
        (rows, columns), stages = config.tile, config.stages
        down, across = config.cluster
        self.a = Copies(cutlass.Uint8, (rows, BLOCK_K), stages, shares=across)
        self.b = Copies(cutlass.Uint8, (columns, BLOCK_K), stages, shares=down)
        self.a_scale = Copies(Float32, (1, rows), stages, swizzled=False)
        self.b_scale = Copies(Float32, (1, columns), stages, swizzled=False)
        box = (64, config.box_columns)
        slots = config.c_buffers * config.row_warpgroups
        self.out = Copies(NUMERIC[config.out_dtype], box, slots)
        self.mainloop, self.epilogue = Mainloop(config), Epilogue(config, self.out)
        self.exchange = Exchange(config)

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, d, bias, alpha, multiprocessors, stream):
        """Launch. ``a`` (M, K) and ``b`` (N, K) as bytes; ``a_scale`` (K / 128, M padded to 4);
        ``b_scale`` (N / 128, K / 128), or as that of A; ``d`` (M, N); ``bias`` (N,) and
        ``alpha`` (), or None.
        """
        self.setup()
        config = self.config
        loads = [self.a.describe(a), self.b.describe(b), self.a_scale.describe(a_scale)]
        if const_expr(config.b_block[0] == 1):
            loads.append(self.b_scale.describe(b_scale))
        loads[:2] = [(promote_l2(atom), view) for atom, view in loads[:2]]
        store = None
        if const_expr(config.tma_store):
            op = cpasync.CopyBulkTensorTileS2GOp()
            if const_expr(config.reduces):
                op = cpasync.CopyReduceBulkTensorTileS2GOp()
            store = self.out.describe(d, op)
        clusters = self.raster.clusters(*d.shape)
        resident = cutlass.min(clusters[0] * clusters[1], multiprocessors // config.blocks)
        self.kernel(
            [pair[0] for pair in loads],
            [pair[1] for pair in loads],
            None if store is None else store[0],
            None if store is None else store[1],
            b_scale,
            (d, bias, alpha),
            cute.ceil_div(a.shape[1], BLOCK_K),
        ).launch(
            grid=(resident * config.blocks, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.blocks, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, atoms, views, store_atom, store_view, b_scale, output, blocks):
        config, d = self.config, output[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = Int32(0)
        if const_expr(config.blocks > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        memory = cutlass.memory.SmemAllocator()
        tiles = [self.a.allocate(memory), self.b.allocate(memory)]
        out = self.out.allocate(memory) if config.tma_store else None
        tiles.append(self.a_scale.allocate(memory))
        if const_expr(config.b_block[0] == 1):
            tiles.append(self.b_scale.allocate(memory))
            b_scales = tiles[3].iterator.toint()
        else:
            size = config.stages * config.scale_bytes[1]
            b_scales = memory.allocate_array(cutlass.Uint8, size, byte_alignment=128).toint()
        barriers = memory.allocate_array(cutlass.Int64, 2 * config.stages)
        full, empty = barriers, barriers + config.stages
        if const_expr(config.alternate):
            self.exchange.allocate(memory)

        if warp == 0:
            for atom in [*atoms, *([store_atom] if config.tma_store else [])]:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in range_constexpr(config.stages):
                    cute.arch.mbarrier_init(full + i, 1 + (config.b_block[0] > 1))
                    cute.arch.mbarrier_init(empty + i, 4 * config.row_warpgroups * config.blocks)
                if const_expr(config.alternate):
                    self.exchange.initialize()
            cute.arch.mbarrier_init_fence()
        self.meet()

        clusters = self.raster.clusters(*d.shape)
        place = clusters, rank, blocks
        low, high = config.registers
        if warp < 4:
            cute.arch.setmaxregister_decrease(low)
            if warp == 0:
                self.load(atoms, views, tiles, full, empty, place)
            if const_expr(config.b_block[0] > 1):  # noqa: SIM102 - one is known when compiling
                if warp == 1:
                    self.fetch(b_scale, b_scales, full, empty, place)
        else:
            cute.arch.setmaxregister_increase(high)
            shared = [each.iterator.toint() for each in tiles[:3]]
            self.multiply(shared, b_scales, full, empty, place, out, store_atom, store_view, output)

    @cute.jit
    def meet(self):
        """All threads that use a barrier have seen it."""
        if const_expr(self.config.blocks > 1):
            cute.arch.cluster_arrive_relaxed()  # barriers have their own fence
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def advance(self, stage, phase):
        stage = stage + 1
        wrapped = Int32(stage == self.config.stages)
        return stage - wrapped * self.config.stages, phase ^ wrapped

    def advance_twice(self, stage, phase):
        return self.advance(*self.advance(stage, phase))

    def first(self):
        """This cluster, and how many there are."""
        blocks = self.config.blocks
        return cute.arch.block_idx()[0] // blocks, cute.arch.grid_dim()[0] // blocks

    @cute.jit
    def load(self, atoms, views, tiles, full, empty, place):
        """Keep the stages filled: the first warp's work."""
        clusters, rank, blocks = place
        copies = [self.a, self.b, self.a_scale, self.b_scale][: len(atoms)]
        nbytes = sum(each.nbytes for each in copies)
        lane = cute.arch.lane_idx()
        start, step = self.first()
        stage, phase = Int32(0), Int32(1)
        for index in range(start, clusters[0] * clusters[1], step):
            row, column = self.raster.tile(index, clusters, rank)
            for block in range(blocks):
                cute.arch.mbarrier_wait(empty + stage, phase)
                barrier = full + stage
                if lane == 0:
                    ptx.expect(barrier.toint(), nbytes)
                k = block * BLOCK_K
                positions = [(row, k), (column, k), (block, row), (block, column)]
                for i in range_constexpr(len(copies)):
                    copies[i].load(atoms[i], views[i], tiles[i], stage, positions[i], barrier, rank)
                stage, phase = self.advance(stage, phase)
        if const_expr(self.config.blocks > 1):  # stay until no other block signals any more
            for _ in range(self.config.stages):
                cute.arch.mbarrier_wait(empty + stage, phase)
                stage, phase = self.advance(stage, phase)

    @cute.jit
    def fetch(self, b_scale, shared, full, empty, place):
        """Bring 128 x 128 scales of B to the stages: the second warp's work.

        A lane has those of every 32nd K block, read long before a stage is free for them.
        """
        config, (clusters, rank, blocks) = self.config, place
        lane = cute.arch.lane_idx()
        start, step = self.first()
        stage, phase = Int32(0), Int32(1)
        values = cute.make_rmem_tensor((config.b_scales,), Float32)
        for index in range(start, clusters[0] * clusters[1], step):
            _, column = self.raster.tile(index, clusters, rank)
            for first in range(0, blocks, 32):
                for i in range_constexpr(config.b_scales):
                    values[i] = Float32(0)
                    where = (column + i * config.segment) // 128
                    if where < b_scale.shape[0] and first + lane < blocks:
                        values[i] = b_scale[where, first + lane]
                for i in range(cutlass.min(blocks - first, Int32(32))):
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    if lane == i:
                        target = shared + stage * config.scale_bytes[1]
                        for j in range_constexpr(config.b_scales):
                            ptx.store_scale(target + 4 * j, values[j])
                        ptx.arrive((full + stage).toint())
                    stage, phase = self.advance(stage, phase)

    @cute.jit
    def multiply(self, shared, b_scales, full, empty, place, out, store_atom, store_view, output):
        """Multiply and store: a warpgroup's work."""
        config, (clusters, rank, blocks) = self.config, place
        thread = cute.arch.thread_idx()[0] - 128
        group = cute.arch.make_warp_uniform(thread // 128)
        thread = ptx.pin(thread % 128)
        half, advance = Int32(0), self.advance
        if const_expr(config.alternate):  # this warpgroup's K blocks, its rows being all
            half, group, advance = group, Int32(0), self.advance_twice
        rows = group * (64 * config.row_steps)
        self.mainloop.start(shared, b_scales, full, empty, rows, thread)
        start, step = self.first()
        if const_expr(config.skew):
            ptx.sleep(group * config.skew)
        stage, phase, turn, taken = half, Int32(0), Int32(0), Int32(0)
        sums = self.mainloop.allocate()
        for index in range(start, clusters[0] * clusters[1], step):
            row, column = self.raster.tile(index, clusters, rank)
            for each in sums:
                each.fill(0.0)
            count = blocks
            if const_expr(config.alternate):
                taken = taken + blocks
                count = (taken + 1 - half) // 2 - (taken - blocks + 1 - half) // 2
            stage, phase = self.mainloop(sums, count, stage, phase, advance)
            at = out, store_atom, store_view, output, group, thread, row + rows, column
            if const_expr(config.alternate):
                if half > 0:
                    self.exchange.send(sums, thread, turn)
                else:
                    self.exchange.receive(sums, thread, turn)
                    self.store(sums, *at)
                turn = turn ^ 1
            else:
                self.store(sums, *at)
        if const_expr(config.tma_store):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store(self, sums, out, atom, view, output, group, thread, row, column):
        d, bias, alpha = output
        self.epilogue.scale(sums, bias, alpha, thread, column)
        if const_expr(self.config.tma_store):
            if const_expr(self.config.accumulate and not self.config.reduces):
                self.epilogue.add(sums, d, thread, row, column)
            self.epilogue.store(sums, out, atom, view, group, thread, row, column)
        else:
            self.epilogue.store_each(sums, d, thread, row, column)


def compile_config(config: Config):
    """The host function of a kernel, which takes tensors of any shape."""

    def scales():
        return any_tensor(Float32, 2, 16, True)

    return compile_for(
        config.arch,
        Gemm(config),
        any_tensor(cutlass.Uint8, 2, 16, True),
        scales(),
        any_tensor(cutlass.Uint8, 2, 16, True),
        scales() if config.b_block[0] == 1 else any_matrix(Float32, 4),
        any_source(config.out_dtype, config.tma_store),
        any_tensor(NUMERIC[config.bias], 1, config.bias.itemsize) if config.bias else None,
        any_tensor(Float32, 0, 4) if config.alpha else None,
        Int32(1),
    )
