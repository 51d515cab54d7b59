# mypy: ignore-errors
"""The kernel of a product, but for what it loads and how it multiplies that.

A block of threads has a warp that loads tiles by TMA, perhaps one that fetches what TMA cannot, and
warpgroups that multiply (a mainloop) and store (``epilogue``). Blocks stay until all tiles are
done (``schedule``). In a cluster, each of two blocks loads half of what both of them need. Where
tiles are few, each of two warpgroups takes every other K block (``exchange``), perhaps of the part
of K that its block of a cluster has (``cluster_exchange``).
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ..common.copies import Copies
from ..common.factor import any_added
from ..common.following import follow
from ..common.numeric import NUMERIC
from ..common.persistent import advance, first, meet
from ..common.schedule import Raster
from ..common.tensor_specs import any_source, compile_for
from . import ptx
from .cluster_exchange import ClusterExchange
from .epilogue import Epilogue
from .exchange import Exchange
from .product_config import ProductConfig

__all__ = ["Product", "compile_product"]


class Product:
    """The kernel of a :class:`ProductConfig` and the host code that launches it.

    One that can be compiled has ``__call__``, which ends in ``launch``, and these:

    Attributes:
        copies: what is loaded for a stage: tiles of A, of B, and others.
        mainloop: adds products of K blocks to a thread's sums.
    """

    fetches = False  # whether the second warp brings something to each stage

    def __init__(self, config: ProductConfig):
        self.config = config
        self.raster = Raster(config.tile, config.cluster, config.group)

    def positions(self, row, column, block) -> list:
        """Of the first element of each copy, for a K block of the tile at ``row``, ``column``."""
        raise NotImplementedError

    def allocate(self, memory) -> list:
        """Addresses of what the second warp fills, for all stages."""
        return []

    def fetch(self, source, shared, full, empty, place):
        """Bring what TMA cannot to the stages: the second warp's work."""
        raise NotImplementedError

    def launch(self, loads, source, output, blocks, multiprocessors, stream) -> None:
        """Launch. ``loads``: atom and view of each copy. ``source``: what the second warp reads.
        ``output``: ``d`` (M, N), ``bias`` (N,) and ``alpha``, or None. ``blocks``: along K.
        """
        config, d = self.config, output[0]
        box, slots = (64, config.box_columns), config.c_buffers * config.row_warpgroups
        self.out = Copies(NUMERIC[config.out_dtype], box, slots)
        self.epilogue = Epilogue(config, self.out)
        self.exchange = (ClusterExchange if config.split > 1 else Exchange)(config)
        self.ring = self.mainloop.ring
        store = None, None
        if config.boxed:
            op = cpasync.CopyBulkTensorTileS2GOp()
            if config.reduces:
                op = cpasync.CopyReduceBulkTensorTileS2GOp()
            store = self.out.describe(d, op)
        clusters = self.raster.clusters(*d.shape)
        size = config.cluster_size
        resident = cutlass.min(clusters[0] * clusters[1], multiprocessors // size)
        atoms, views = [pair[0] for pair in loads], [pair[1] for pair in loads]
        self.kernel(atoms, views, *store, source, output, blocks).launch(
            grid=(resident * size, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(size, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, atoms, views, store_atom, store_view, source, output, blocks):
        config, d = self.config, output[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank, part = Int32(0), Int32(0)
        if const_expr(config.blocks > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if const_expr(config.split > 1):
            part = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        memory = cutlass.memory.SmemAllocator()
        tiles = [each.allocate(memory) for each in self.copies[:2]]
        out = self.out.allocate(memory) if config.boxed else None
        tiles += [each.allocate(memory) for each in self.copies[2:]]
        shared = [each.iterator.toint() for each in tiles] + self.allocate(memory)
        waits = self.ring.waits
        barriers = memory.allocate_array(cutlass.Int64, waits + config.stages)
        full, empty = barriers, barriers + waits
        if const_expr(config.alternate):
            self.exchange.allocate(memory)

        if warp == 0:
            for atom in [*atoms, *([store_atom] if config.boxed else [])]:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in range_constexpr(waits):
                    cute.arch.mbarrier_init(full + i, 1 + self.fetches)
                    if const_expr(i < config.stages):
                        readers = 4 * config.row_warpgroups * config.blocks
                        cute.arch.mbarrier_init(empty + i, readers)
                if const_expr(config.alternate):
                    self.exchange.initialize()
            cute.arch.mbarrier_init_fence()
        if const_expr(config.split > 1):
            cute.arch.cluster_arrive_relaxed()  # others wait for it before they send sums
        for each, own in zip(self.copies, tiles, strict=True):
            each.clear(own, config.threads)
        meet(config.blocks)
        follow()

        clusters = self.raster.clusters(*d.shape)
        place = clusters, rank, 0, blocks
        if const_expr(config.split > 1):
            begin, end = part * blocks // config.split, (part + 1) * blocks // config.split
            place = clusters, rank, begin, end
        low, high = config.registers
        if warp < 4:
            cute.arch.setmaxregister_decrease(low)
            if warp == 0:
                self.load(atoms, views, tiles, full, empty, place)
            if const_expr(self.fetches):  # noqa: SIM102 - one is known when compiling
                if warp == 1:
                    self.fetch(source, shared, full, empty, place)
            if const_expr(config.split > 1):
                cute.arch.cluster_wait()
        else:
            cute.arch.setmaxregister_increase(high)
            if const_expr(config.split > 1):
                cute.arch.cluster_wait()
            self.multiply(shared, full, empty, place, part, out, store_atom, store_view, output)

    def advance(self, stage, phase):
        return advance(stage, phase, self.config.stages)

    @cute.jit
    def load(self, atoms, views, tiles, full, empty, place):
        """Keep the stages filled: the first warp's work."""
        clusters, rank, begin, end = place
        nbytes = sum(each.moved for each in self.copies)
        lane = cute.arch.lane_idx()
        start, step = first(self.config.cluster_size)
        stage, phase = Int32(0), Int32(1)
        for index in range(start, clusters[0] * clusters[1], step):
            row, column = self.raster.tile(index, clusters, rank)
            for block in range(begin, end):
                cute.arch.mbarrier_wait(empty + stage, phase)
                barrier = self.ring.filled(full, stage, phase)
                if lane == 0:
                    ptx.expect(barrier.toint(), nbytes)
                positions = self.positions(row, column, block)
                for i in range_constexpr(len(positions)):
                    self.copies[i].load(
                        atoms[i], views[i], tiles[i], stage, positions[i], barrier, rank
                    )
                stage, phase = self.advance(stage, phase)
        if const_expr(self.config.blocks > 1):  # stay until no other block signals any more
            for _ in range(self.config.stages):
                cute.arch.mbarrier_wait(empty + stage, phase)
                stage, phase = self.advance(stage, phase)

    @cute.jit
    def multiply(self, shared, full, empty, place, part, out, store_atom, store_view, output):
        """Multiply and store: a warpgroup's work."""
        config, (clusters, rank, begin, end) = self.config, place
        blocks = end - begin
        thread = cute.arch.thread_idx()[0] - 128
        group = cute.arch.make_warp_uniform(thread // 128)
        thread = ptx.pin(thread % 128)
        half = Int32(0)
        if const_expr(config.alternate):  # this warpgroup's K blocks, its rows being all
            half, group = group, Int32(0)
        rows = group * (64 * config.row_steps)
        self.mainloop.start(shared, full, empty, rows, thread)
        start, step = first(config.cluster_size)
        if const_expr(config.split > 1):
            self.exchange.start(part, half, thread)
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
            stage, phase = self.mainloop(sums, count, stage, phase)
            column = column + part * config.own_columns
            at = out, store_atom, store_view, output, group, thread, row + rows, column
            if const_expr(config.split > 1):
                filled = row + thread // 32 * 16 < output[0].shape[0]
                self.exchange.send(sums, turn, filled)
                if half == 0:
                    more = index + step < clusters[0] * clusters[1]
                    self.exchange.receive(sums, turn, filled, more)
                    self.store(sums, *at)
                turn = turn ^ 1
            elif const_expr(config.alternate):
                if half > 0:
                    self.exchange.send(sums, thread, turn)
                else:
                    self.exchange.receive(sums, thread, turn)
                    self.store(sums, *at)
                turn = turn ^ 1
            else:
                self.store(sums, *at)
        if const_expr(config.boxed):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store(self, sums, out, atom, view, output, group, thread, row, column):
        d, bias, alpha = output
        self.epilogue.scale(sums, bias, alpha, thread, column)
        if const_expr(self.config.tma_store):
            if const_expr(self.config.accumulate and not self.config.reduces):
                self.epilogue.add(sums, d, thread, row, column)
            if const_expr(self.config.boxed):
                self.epilogue.store(sums, out, atom, view, group, thread, row, column)
            else:
                self.epilogue.store_pairs(sums, d, thread, row, column)
        else:
            self.epilogue.store_each(sums, d, thread, row, column)


def compile_product(product: Product, *operands):
    """The host function of a kernel, which takes tensors of any shape: ``operands``, the output,
    bias, alpha, and how many multiprocessors there are."""
    config = product.config
    return compile_for(
        config.arch,
        product,
        *operands,
        any_source(config.out_dtype, config.tma_store),
        *any_added(config),
        Int32(1),
    )
