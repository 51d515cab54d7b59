# mypy: ignore-errors
"""MXFP8, MXFP4 and NVFP4, and bf16 times these: widened to bf16 in the kernel, multiplied as such.

A block of threads has a warp that loads tiles by TMA, three that bring block scales, a warpgroup
that widens the right operand from shared memory to shared memory (``widened_converter``), and
warpgroups that widen the left one in registers, multiply (``widened_mainloop``) and store
(``epilogue``). Blocks stay until all tiles are done (``schedule``). Blocks of a cluster each take a
part of K (``exchange``).
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ..common.copies import Copies
from ..common.schedule import Raster
from ..gpu.any_tensor import any_source, any_tensor, compile_for
from ..gpu.tile import NUMERIC
from . import ptx
from .epilogue import Epilogue
from .widened_config import BF16, BLOCK_K, Config
from .widened_converter import Converter
from .widened_exchange import Exchange
from .widened_mainloop import Mainloop
from .widened_scales import Scales
from .widened_transposed import TransposedEpilogue

__all__ = ["Widened", "compile_config"]


class Widened:
    """The kernel of a :class:`Config` and the host code that launches it."""

    def __init__(self, config: Config):
        self.config = config
        self.raster = Raster(config.out_tile, (1, 1), config.group)

    def setup(self):
        """What needs a compiler that runs."""
        config = self.config
        self.copies = []
        for rows, nbytes in zip(config.tile, config.row_bytes, strict=True):
            wide = nbytes == 2 * BLOCK_K  # bf16: a stage is two tiles of 128 bytes a row
            kind = cutlass.BFloat16 if wide else cutlass.Uint8
            tile = (rows, BLOCK_K // 2 if wide else nbytes)
            self.copies.append(Copies(kind, tile, config.stages * (2 if wide else 1)))
        box = (64, config.box_columns)
        self.out = Copies(NUMERIC[config.out_dtype], box, config.c_buffers * config.warpgroups)
        epilogue = TransposedEpilogue if config.swap else Epilogue
        self.epilogue = epilogue(config, self.out)
        self.mainloop, self.converter = Mainloop(config), Converter(config)
        self.scales, self.exchange = Scales(config), Exchange(config)

    @cute.jit
    def __call__(
        self, left, left_scale, right, right_scale, d, bias, alpha, multiprocessors, stream
    ):
        """Launch. ``left`` and ``right`` (rows, K) as bytes, or ``right`` bf16; their scales (rows,
        K / block), None for bf16; ``d`` (M, N); ``bias`` (N,) and ``alpha`` (), or None.
        """
        self.setup()
        config = self.config
        loads = [self.copies[0].describe(left), self.copies[1].describe(right)]
        store = None
        if const_expr(config.tma_store):
            op = cpasync.CopyBulkTensorTileS2GOp()
            if const_expr(config.reduces):
                op = cpasync.CopyReduceBulkTensorTileS2GOp()
            store = self.out.describe(d, op)
        clusters = self.raster.clusters(*d.shape)
        resident = cutlass.min(clusters[0] * clusters[1], multiprocessors // config.split)
        self.kernel(
            [pair[0] for pair in loads],
            [pair[1] for pair in loads],
            None if store is None else store[0],
            None if store is None else store[1],
            (left_scale, right_scale),
            (d, bias, alpha),
            cute.ceil_div(left.shape[1], config.row_bytes[0]),
        ).launch(
            grid=(resident * config.split, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.split, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, atoms, views, store_atom, store_view, scales, output, blocks):
        config, d = self.config, output[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        part = Int32(0)
        if const_expr(config.split > 1):
            part = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        memory = cutlass.memory.SmemAllocator()
        tiles = [each.allocate(memory) for each in self.copies]
        wide = memory.allocate_array(
            cutlass.Uint8, config.wide * config.tile[1] * 256, byte_alignment=1024
        ).toint()
        out = self.out.allocate(memory) if config.tma_store else None
        shared_scales = [
            memory.allocate_array(cutlass.Uint8, config.stages * nbytes, byte_alignment=128).toint()
            for nbytes in config.scale_bytes
            if nbytes
        ]
        barriers = memory.allocate_array(cutlass.Int64, 2 * (config.stages + config.wide))
        full, empty = barriers, barriers + config.stages
        wide_full = empty + config.stages
        wide_empty = wide_full + config.wide
        if const_expr(config.split > 1):
            self.exchange.allocate(memory)

        if warp == 0:
            for atom in [*atoms, *([store_atom] if config.tma_store else [])]:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in range_constexpr(config.stages):
                    cute.arch.mbarrier_init(full + i, 1 + self.scales.threads)
                    cute.arch.mbarrier_init(empty + i, 4 * (1 + config.warpgroups))
                for i in range_constexpr(config.wide):
                    cute.arch.mbarrier_init(wide_full + i, 4)
                    cute.arch.mbarrier_init(wide_empty + i, 4 * config.warpgroups)
                if const_expr(config.split > 1):
                    self.exchange.initialize()
            cute.arch.mbarrier_init_fence()
        self.meet()

        first, last = part * blocks // config.split, (part + 1) * blocks // config.split
        given = d, part, (first, last)
        pipelines = (full, empty), (wide_full, wide_empty)
        low, middle, high = config.registers
        if warp < 4:
            cute.arch.setmaxregister_decrease(low)
            if warp == 0:
                self.load(atoms, views, tiles, full, empty, self.place(*given))
            else:
                self.bring(scales, shared_scales, full, empty, self.place(*given))
        elif warp < 8:
            cute.arch.setmaxregister_decrease(middle)
            own = tiles[1].iterator.toint(), shared_scales[-1], wide
            self.convert(own, pipelines, self.place(*given))
        else:
            cute.arch.setmaxregister_increase(high)
            shared = tiles[0].iterator.toint(), shared_scales[0], wide
            at = self.place(*given)
            self.multiply(shared, pipelines, at, out, store_atom, store_view, output)
        if const_expr(config.split > 1):  # a block's memory is needed until the others are done
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def meet(self):
        """All threads that use a barrier have seen it."""
        if const_expr(self.config.split > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def advance(self, stage, phase, stages: int):
        stage = stage + 1
        wrapped = Int32(stage == stages)
        return stage - wrapped * stages, phase ^ wrapped

    def place(self, d, part, blocks):
        """Clusters of tiles, this block's part of K and its K blocks; for each role by itself, for
        there are no registers to keep it for all."""
        return self.raster.clusters(*d.shape), part, blocks

    def first(self):
        """This cluster, and how many there are."""
        blocks = self.config.split
        return cute.arch.block_idx()[0] // blocks, cute.arch.grid_dim()[0] // blocks

    def tile(self, index, clusters):
        """First row of the left and of the right operand."""
        row, column = self.raster.tile(index, clusters, 0)
        return (column, row) if self.config.swap else (row, column)

    @cute.jit
    def load(self, atoms, views, tiles, full, empty, place):
        """Keep the stages filled: the first warp's work."""
        config, (clusters, _, blocks) = self.config, place
        copies = self.copies
        several = copies[1].slots // config.stages
        nbytes = copies[0].nbytes + several * copies[1].nbytes
        lane = cute.arch.lane_idx()
        start, step = self.first()
        stage, phase = Int32(0), Int32(1)
        for index in range(start, clusters[0] * clusters[1], step):
            row, column = self.tile(index, clusters)
            for block in range(blocks[0], blocks[1]):
                cute.arch.mbarrier_wait(empty + stage, phase)
                barrier = full + stage
                if lane == 0:
                    ptx.expect(barrier.toint(), nbytes)
                position = (row, block * copies[0].tile[1])
                copies[0].load(atoms[0], views[0], tiles[0], stage, position, barrier)
                for i in range_constexpr(several):
                    position = (column, (block * several + i) * copies[1].tile[1])
                    slot = stage * several + i
                    copies[1].load(atoms[1], views[1], tiles[1], slot, position, barrier)
                stage, phase = self.advance(stage, phase, config.stages)

    @cute.jit
    def bring(self, scales, shared, full, empty, place):
        """Bring block scales to the stages: three warps' work."""
        config, (clusters, _, blocks) = self.config, place
        thread = cute.arch.thread_idx()[0] - 32
        start, step = self.first()
        stage, phase = Int32(0), Int32(1)
        for index in range(start, clusters[0] * clusters[1], step):
            rows = self.tile(index, clusters)
            for block in range(blocks[0], blocks[1]):
                cute.arch.mbarrier_wait(empty + stage, phase)
                for i in range_constexpr(len(shared)):
                    target = shared[i] + stage * config.scale_bytes[i]
                    self.scales(scales[i], target, config.tile[i], rows[i], block, thread)
                self.scales.arrive((full + stage).toint())
                stage, phase = self.advance(stage, phase, config.stages)

    @cute.jit
    def convert(self, shared, pipelines, place):
        """Widen the right operand: a warpgroup's work."""
        clusters, _, blocks = place
        thread = cute.arch.thread_idx()[0] - 128
        self.converter.start(shared, *pipelines, thread)
        start, step = self.first()
        stage, phase, slot, turn = Int32(0), Int32(0), Int32(0), Int32(0)
        for _ in range(start, clusters[0] * clusters[1], step):
            stage, phase, slot, turn = self.converter(
                blocks[1] - blocks[0], (stage, phase, slot, turn), self.advance
            )

    @cute.jit
    def multiply(self, shared, pipelines, place, out, store_atom, store_view, output):
        """Multiply and store: a warpgroup's work."""
        config, (clusters, part, blocks) = self.config, place
        thread = cute.arch.thread_idx()[0] - 256
        group = cute.arch.make_warp_uniform(thread // 128)
        thread = ptx.pin(thread % 128)
        rows = group * (64 * config.row_steps)
        self.mainloop.start(shared, *pipelines, rows, thread)
        start, step = self.first()
        stage, phase, slot, turn = Int32(0), Int32(0), Int32(0), Int32(0)
        swapped = Int32(0)
        sums = self.mainloop.allocate()
        for index in range(start, clusters[0] * clusters[1], step):
            row, column = self.tile(index, clusters)
            for each in sums:
                each.fill(0.0)
            stage, phase, slot, turn = self.mainloop(
                sums, blocks[1] - blocks[0], (stage, phase, slot, turn), self.advance
            )
            # in the loop, so that what follows is not computed before it, and kept
            own = cute.arch.make_warp_uniform(ptx.pin(group))
            here = own, ptx.pin(thread)
            at = out, store_atom, store_view, output, *here, row + own * (64 * config.row_steps)
            if const_expr(config.split > 1):
                if part == own % config.split:
                    self.exchange.receive(sums, *here, swapped)
                    self.store(sums, *at, column)
                else:
                    self.exchange.send(sums, *here, swapped, part)
                swapped = swapped ^ 1
            else:
                self.store(sums, *at, column)
        if const_expr(config.tma_store):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store(self, sums, out, atom, view, output, group, thread, row, column):
        """``row``, ``column``: of the left and of the right operand."""
        config, (d, bias, alpha) = self.config, output
        if const_expr(config.gain != 1):
            for each in sums:
                for i in range_constexpr(config.batch // 2):
                    each[i] = each[i] * Float32(config.gain)
        at = (column, row) if config.swap else (row, column)
        self.epilogue.scale(sums, bias, alpha, thread, at[1])
        if const_expr(config.tma_store):
            if const_expr(config.accumulate and not config.reduces):
                self.epilogue.add(sums, d, thread, *at)
            self.epilogue.store(sums, out, atom, view, group, thread, *at)
        else:
            self.epilogue.store_each(sums, d, thread, *at)


def compile_config(config: Config):
    """The host function of a kernel, which takes tensors of any shape."""
    align = config.scale_row if config.async_scales else 1
    kinds = cutlass.Uint8, cutlass.BFloat16 if config.right == BF16 else cutlass.Uint8
    data = [any_tensor(kind, 2, 16, True) for kind in kinds]
    scales = [any_tensor(cutlass.Uint8, 2, align, True) if n else None for n in config.scale_bytes]
    return compile_for(
        config.arch,
        Widened(config),
        data[0],
        scales[0],
        data[1],
        scales[1],
        any_source(config.out_dtype, config.tma_store),
        any_tensor(NUMERIC[config.bias], 1, config.bias.itemsize) if config.bias else None,
        any_tensor(Float32, 0, 4) if config.alpha else None,
        Int32(1),
    )
