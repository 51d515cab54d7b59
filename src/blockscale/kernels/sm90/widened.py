# mypy: ignore-errors
"""MXFP8, MXFP4 and NVFP4, and bf16 times these: few rows of A, widened in the kernel to bf16.

A block of threads has a warp that loads tiles by TMA, three that bring block scales, a warpgroup
that widens A from shared memory to shared memory (``widened_converter``) or puts the columns of
bf16 in order (``widened_order``), and warpgroups that widen B in registers, multiply
(``widened_mainloop``) and store (``widened_transposed``). Blocks stay until all tiles are done: all
rows of A and some of B. Blocks of a cluster each take a part of K (``widened_exchange``).
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ..common.copies import Copies
from ..common.following import follow
from ..common.persistent import advance, first, meet
from ..gpu.any_tensor import any_source, any_tensor, compile_for
from ..gpu.tile import NUMERIC
from . import ptx
from .widened_config import BF16, BLOCK_K, WARPGROUPS, Config
from .widened_converter import Converter
from .widened_exchange import Exchange
from .widened_mainloop import Mainloop
from .widened_order import Orderer
from .widened_scales import Scales
from .widened_transposed import TransposedEpilogue

__all__ = ["Widened", "compile_config"]

_THREADS = 128 * (2 + WARPGROUPS)


class Widened:
    """The kernel of a :class:`Config` and the host code that launches it."""

    def __init__(self, config: Config):
        self.config = config
        self.panels = (
            1 if config.wide else 2
        )  # of bf16: a stage of A is two tiles of 128 bytes a row

    def setup(self):
        """What needs a compiler that runs."""
        config, panels = self.config, self.panels
        (a_rows, b_rows), (a_bytes, b_bytes) = config.tile, config.row_bytes
        kind, across = (cutlass.Uint8, a_bytes) if config.wide else (cutlass.BFloat16, BLOCK_K // 2)
        slots = config.stages * panels
        self.a = Copies(kind, (a_rows, across), slots, rows=config.loaded_rows)
        self.b = Copies(cutlass.Uint8, (b_rows, b_bytes), config.stages)
        self.out = Copies(NUMERIC[config.out_dtype], (64, 64), WARPGROUPS)
        self.epilogue = TransposedEpilogue(config, self.out)
        self.mainloop = Mainloop(config)
        self.converter = Converter(config) if config.wide else Orderer(config)
        self.scales, self.exchange = Scales(config), Exchange(config)

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, d, bias, alpha, multiprocessors, stream):
        """Launch. ``a`` (M, K) as bytes, or bf16, and ``b`` (N, K) as bytes; their scales (rows,
        K / block), None for bf16; ``d`` (M, N); ``bias`` (N,) and ``alpha`` (), or None. M is at
        most a tile's.
        """
        self.setup()
        config = self.config
        loads = [self.a.describe(a), self.b.describe(b)]
        store = None, None
        if const_expr(config.tma_store):
            store = self.out.describe(d, cpasync.CopyBulkTensorTileS2GOp())
        tiles = cute.ceil_div(b.shape[0], config.tile[1])
        resident = cutlass.min(tiles, multiprocessors // config.split)
        self.kernel(
            [pair[0] for pair in loads],
            [pair[1] for pair in loads],
            store[0],
            store[1],
            (a_scale, b_scale),
            (d, bias, alpha),
            Int32(tiles),
            cute.ceil_div(b.shape[1], config.row_bytes[1]),
        ).launch(
            grid=(resident * config.split, 1, 1),
            block=(_THREADS, 1, 1),
            cluster=(config.split, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, atoms, views, store_atom, store_view, scales, output, tiles, blocks):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        part = Int32(0)
        if const_expr(config.split > 1):
            part = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        memory = cutlass.memory.SmemAllocator()
        shared = [self.a.allocate(memory), self.b.allocate(memory)]
        wide = shared[0].iterator.toint()
        if const_expr(config.wide):
            nbytes = config.wide * config.tile[0] * 256
            wide = memory.allocate_array(cutlass.Uint8, nbytes, byte_alignment=1024).toint()
        out = self.out.allocate(memory) if config.tma_store else None
        shared_scales = [
            memory.allocate_array(cutlass.Uint8, config.stages * nbytes, byte_alignment=128).toint()
            if nbytes
            else None
            for nbytes in config.scale_bytes
        ]
        wides = config.wide or config.stages
        barriers = memory.allocate_array(cutlass.Int64, 2 * (config.stages + wides))
        full, empty = barriers, barriers + config.stages
        wide_full = empty + config.stages
        wide_empty = wide_full + wides if config.wide else empty
        if const_expr(config.split > 1):
            self.exchange.allocate(memory)

        if warp == 0:
            for atom in [*atoms, *([store_atom] if config.tma_store else [])]:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in range_constexpr(config.stages):
                    cute.arch.mbarrier_init(full + i, 1 + self.scales.threads)
                    cute.arch.mbarrier_init(empty + i, config.readers)
                for i in range_constexpr(wides):
                    cute.arch.mbarrier_init(wide_full + i, config.converters)
                for i in range_constexpr(config.wide):
                    cute.arch.mbarrier_init(wide_empty + i, 4 * WARPGROUPS)
                if const_expr(config.split > 1):
                    self.exchange.initialize()
            cute.arch.mbarrier_init_fence()
        self.a.clear(shared[0], _THREADS)
        meet(config.split)
        follow()

        place = tiles, part * blocks // config.split, (part + 1) * blocks // config.split
        pipelines = (full, empty), (wide_full, wide_empty)
        # of a multiprocessor's 512 registers for a thread of each warpgroup
        if warp < 4:
            cute.arch.setmaxregister_decrease(32)
            if warp == 0:
                self.load(atoms, views, shared, full, empty, place)
            else:
                self.bring(scales, shared_scales, full, empty, place)
        elif warp < 8:
            cute.arch.setmaxregister_decrease(80)
            own = shared[0].iterator.toint(), shared_scales[0], wide
            if warp < 4 + config.converters:
                self.convert(own, pipelines, place)
        else:
            cute.arch.setmaxregister_increase(200)
            own = shared[1].iterator.toint(), shared_scales[1], wide
            self.multiply(own, pipelines, place, part, out, store_atom, store_view, output)

    @cute.jit
    def load(self, atoms, views, shared, full, empty, place):
        """Keep the stages filled: the first warp's work."""
        config, (tiles, begin, end) = self.config, place
        nbytes = self.panels * self.a.moved + self.b.nbytes
        lane = cute.arch.lane_idx()
        start, step = first(config.split)
        stage, phase = Int32(0), Int32(1)
        for index in range(start, tiles, step):
            for block in range(begin, end):
                cute.arch.mbarrier_wait(empty + stage, phase)
                barrier = full + stage
                if lane == 0:
                    ptx.expect(barrier.toint(), nbytes)
                position = (index * config.tile[1], block * self.b.tile[1])
                self.b.load(atoms[1], views[1], shared[1], stage, position, barrier)
                for i in range_constexpr(self.panels):
                    slot, panel = stage * self.panels + i, block * self.panels + i
                    position = (0, panel * self.a.tile[1])
                    self.a.load(atoms[0], views[0], shared[0], slot, position, barrier)
                stage, phase = advance(stage, phase, config.stages)

    @cute.jit
    def bring(self, scales, shared, full, empty, place):
        """Bring block scales to the stages: three warps' work."""
        config, (tiles, begin, end) = self.config, place
        thread = cute.arch.thread_idx()[0] - 32
        start, step = first(config.split)
        stage, phase = Int32(0), Int32(1)
        for index in range(start, tiles, step):
            rows = 0, index * config.tile[1]
            for block in range(begin, end):
                cute.arch.mbarrier_wait(empty + stage, phase)
                for i in range_constexpr(0 if config.wide else 1, 2):
                    target = shared[i] + stage * config.scale_bytes[i]
                    self.scales(scales[i], target, config.tile[i], rows[i], block, thread)
                self.scales.arrive((full + stage).toint())
                stage, phase = advance(stage, phase, config.stages)

    @cute.jit
    def convert(self, shared, pipelines, place):
        """Widen A: a warpgroup's work."""
        tiles, begin, end = place
        thread = cute.arch.thread_idx()[0] - 128
        self.converter.start(shared, *pipelines, thread)
        start, step = first(self.config.split)
        stage, phase, slot, turn = Int32(0), Int32(0), Int32(0), Int32(0)
        for _ in range(start, tiles, step):
            stage, phase, slot, turn = self.converter(
                end - begin, (stage, phase, slot, turn), advance
            )

    @cute.jit
    def multiply(self, shared, pipelines, place, part, out, store_atom, store_view, output):
        """Multiply and store: a warpgroup's work."""
        config, (tiles, begin, end) = self.config, place
        thread = cute.arch.thread_idx()[0] - 256
        group = cute.arch.make_warp_uniform(thread // 128)
        thread = ptx.pin(thread % 128)
        self.mainloop.start(shared, *pipelines, group * (64 * config.row_steps), thread)
        start, step = first(config.split)
        stage, phase, slot, turn = Int32(0), Int32(0), Int32(0), Int32(0)
        swapped = Int32(0)
        sums = self.mainloop.allocate()
        for index in range(start, tiles, step):
            for each in sums:
                each.fill(0.0)
            stage, phase, slot, turn = self.mainloop(
                sums, end - begin, (stage, phase, slot, turn), advance
            )
            # in the loop, so that what follows is not computed before it, and kept
            own = cute.arch.make_warp_uniform(ptx.pin(group))
            here = ptx.pin(thread)
            at = out, store_atom, store_view, output, own, here
            for i in range_constexpr(config.row_steps):
                share = own * config.row_steps + i
                column = index * config.tile[1] + share * 64
                if const_expr(config.split > 1):
                    given = share, sums[i], here, swapped
                    if part == share % config.split:
                        self.exchange.receive(*given, index + step < tiles)
                        self.store(sums[i], *at, column)
                    else:
                        self.exchange.send(*given, part)
                else:
                    self.store(sums[i], *at, column)
            swapped = swapped ^ 1
        if const_expr(config.tma_store):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store(self, sums, out, atom, view, output, group, thread, column):
        """Columns of the output, 64 from ``column`` on."""
        d, bias, alpha = output
        self.epilogue.scale(sums, bias, alpha, thread, column)
        if const_expr(self.config.tma_store):
            self.epilogue.store(sums, out, atom, view, group, thread, column)
        else:
            self.epilogue.store_each(sums, d, thread, column)


def compile_config(config: Config):
    """The host function of a kernel, which takes tensors of any shape."""
    align = config.scale_row if config.async_scales else 1
    a = cutlass.BFloat16 if config.a_format == BF16 else cutlass.Uint8
    scales = [any_tensor(cutlass.Uint8, 2, align, True) if n else None for n in config.scale_bytes]
    return compile_for(
        config.arch,
        Widened(config),
        any_tensor(a, 2, 16, True),
        scales[0],
        any_tensor(cutlass.Uint8, 2, 16, True),
        scales[1],
        any_source(config.out_dtype, config.tma_store),
        any_tensor(NUMERIC[config.bias], 1, config.bias.itemsize) if config.bias else None,
        any_tensor(Float32, 0, 4) if config.alpha else None,
        Int32(1),
    )
