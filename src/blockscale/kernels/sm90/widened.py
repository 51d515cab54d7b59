# mypy: ignore-errors
"""Few rows of bf16 times MXFP8, MXFP4 and NVFP4, which are widened to bf16 in registers.

A block of threads has a warp that loads tiles by TMA, three that bring block scales, and
warpgroups that widen B, multiply (``widened_mainloop``) and store (``widened_transposed``). Blocks
stay until all tiles are done: rows of A, all in most cases, and some of B. Blocks of a cluster each
take a part of K, and so may warpgroups of a block, which take stages in turn
(``widened_exchange``).

A has been put in order, and what is not bf16 widened, by a kernel that this one follows: while it
runs, B's first stages are brought as near as the L2 cache.
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
from ..common.tensor_specs import any_source, any_tensor, compile_for
from . import ptx
from .widened_config import B_ROWS, BLOCK_K, WARPGROUPS, Config
from .widened_exchange import Exchange
from .widened_mainloop import Mainloop
from .widened_scales import Scales
from .widened_transposed import TransposedEpilogue

__all__ = ["Widened", "compile_config"]

# of warps that load, and of those that multiply, as many as there are for such warpgroups
_REGISTERS = {1: (40, 232), 2: (32, 112)}
_PANELS = 2  # of a stage of A: tiles of 128 bytes a row


class Widened:
    """The kernel of a :class:`Config` and the host code that launches it."""

    def __init__(self, config: Config):
        self.config = config
        self.threads = 128 * (1 + WARPGROUPS * config.parts)

    def setup(self):
        """What needs a compiler that runs."""
        config = self.config
        panel, slots = BLOCK_K // _PANELS, config.stages * _PANELS
        self.a = Copies(cutlass.BFloat16, (config.rows, panel), slots, rows=config.loaded_rows)
        self.b = Copies(cutlass.Uint8, (B_ROWS, config.row_bytes), config.stages)
        self.out = Copies(NUMERIC[config.out_dtype], (64, 64), config.own_shares)
        self.epilogue = TransposedEpilogue(config, self.out)
        self.mainloop = Mainloop(config)
        self.ring = self.mainloop.ring
        self.scales, self.exchange = Scales(config), Exchange(config)

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, d, bias, alpha, multiprocessors, stream):
        """Launch. ``a`` (M, K) bf16, in order and padded with zeros to whole stages; ``b`` (N, K)
        as bytes, ``b_scale`` (N, K / block); ``d`` (M, N); ``bias`` (N,) and ``alpha``, or None.
        There is no ``a_scale``.
        """
        self.setup()
        config = self.config
        loads = [self.a.describe(a), self.b.describe(b)]
        store = None, None
        if const_expr(config.tma_store):
            store = self.out.describe(d, cpasync.CopyBulkTensorTileS2GOp())
        down = cute.ceil_div(a.shape[0], config.rows)
        tiles = down * cute.ceil_div(b.shape[0], B_ROWS)
        resident = cutlass.min(tiles, multiprocessors // config.split)
        self.kernel(
            [pair[0] for pair in loads],
            [pair[1] for pair in loads],
            store[0],
            store[1],
            b_scale,
            (d, bias, alpha),
            (Int32(tiles), Int32(down)),
            cute.ceil_div(b.shape[1], config.row_bytes),
        ).launch(
            grid=(resident * config.split, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(config.split, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, atoms, views, store_atom, store_view, scale, output, tiles, blocks):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        part = Int32(0)
        if const_expr(config.split > 1):
            part = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        memory = cutlass.memory.SmemAllocator()
        shared = [self.a.allocate(memory), self.b.allocate(memory)]
        out = self.out.allocate(memory) if config.tma_store else None
        nbytes = config.stages * config.scale_bytes
        scales = memory.allocate_array(cutlass.Uint8, nbytes, byte_alignment=128).toint()
        waits = self.ring.waits
        full = memory.allocate_array(cutlass.Int64, waits + config.stages)
        empty = full + waits
        if const_expr(config.sources > 1):
            self.exchange.allocate(memory)

        if warp == 0:
            for atom in [*atoms, *([store_atom] if config.tma_store else [])]:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in range_constexpr(waits):
                    cute.arch.mbarrier_init(full + i, 1 + self.scales.threads)
                for i in range_constexpr(config.stages):
                    cute.arch.mbarrier_init(empty + i, 128 * WARPGROUPS)
                if const_expr(config.sources > 1):
                    self.exchange.initialize()
            cute.arch.mbarrier_init_fence()
        self.a.clear(shared[0], self.threads)
        meet(config.split)

        place = *tiles, part * blocks // config.split, (part + 1) * blocks // config.split
        few, many = _REGISTERS[config.parts]
        if warp < 4:
            cute.arch.setmaxregister_decrease(few)
            if warp == 0:
                self.load(atoms, views, shared, full, empty, place)
            else:
                self.bring(scale, scales, full, empty, place)
        else:
            cute.arch.setmaxregister_increase(many)
            own = *(each.iterator.toint() for each in shared), scales
            self.multiply(own, (full, empty), place, part, out, store_atom, store_view, output)

    def corner(self, index, down):
        """A tile's first row and column of the output. A division: not for each K block."""
        return index % down * self.config.rows, index // down * B_ROWS

    @cute.jit
    def load(self, atoms, views, shared, full, empty, place):
        """Keep the stages filled: the first warp's work."""
        config, (tiles, down, begin, end) = self.config, place
        nbytes = _PANELS * self.a.moved + self.b.nbytes
        lane = cute.arch.lane_idx()
        start, step = first(config.split)
        _, column = self.corner(start, down)
        with cute.arch.elect_one():
            for block in range(begin, cutlass.min(end, begin + config.stages)):
                position = (column, block * self.b.tile[1])
                _, piece = self.b.pieces(atoms[1], views[1], shared[1], 0, position, 0)
                cute.prefetch(atoms[1], piece)
        follow()
        stage, phase = Int32(0), Int32(1)
        for index in range(start, tiles, step):
            row, column = self.corner(index, down)
            for block in range(begin, end):
                cute.arch.mbarrier_wait(empty + stage, phase)
                barrier = self.ring.filled(full, stage, phase)
                if lane == 0:
                    ptx.expect(barrier.toint(), nbytes)
                position = (column, block * self.b.tile[1])
                self.b.load(atoms[1], views[1], shared[1], stage, position, barrier)
                for i in range_constexpr(_PANELS):
                    slot, panel = stage * _PANELS + i, block * _PANELS + i
                    position = (row, panel * self.a.tile[1])
                    self.a.load(atoms[0], views[0], shared[0], slot, position, barrier)
                stage, phase = advance(stage, phase, config.stages)

    @cute.jit
    def bring(self, scale, shared, full, empty, place):
        """Bring block scales to the stages: three warps' work."""
        config, (tiles, down, begin, end) = self.config, place
        thread = cute.arch.thread_idx()[0] - 32
        start, step = first(config.split)
        stage, phase = Int32(0), Int32(1)
        _, column = self.corner(start, down)
        self.scales.prefetch(scale, column, begin, thread)
        follow()
        for index in range(start, tiles, step):
            _, column = self.corner(index, down)
            for block in range(begin, end):
                cute.arch.mbarrier_wait(empty + stage, phase)
                target = shared + stage * config.scale_bytes
                self.scales(scale, target, column, block, thread)
                self.scales.arrive(self.ring.filled(full, stage, phase).toint())
                stage, phase = advance(stage, phase, config.stages)

    @cute.jit
    def multiply(self, shared, barriers, place, part, out, store_atom, store_view, output):
        """Multiply and store: a warpgroup's work."""
        config, (tiles, down, begin, end) = self.config, place
        thread = cute.arch.thread_idx()[0] - 128
        warpgroup = cute.arch.make_warp_uniform(thread // 128)
        thread = ptx.pin(thread % 128)
        self.mainloop.start(shared, barriers, warpgroup % WARPGROUPS * 64, thread)
        start, step = first(config.split)
        before = warpgroup // WARPGROUPS  # stages that others take first
        stage, phase = before, Int32(0)
        swapped = Int32(0)
        sums = self.mainloop.allocate()
        follow()
        for index in range(start, tiles, step):
            sums.fill(0.0)
            count = end - begin
            if const_expr(config.parts > 1):
                count = (end - begin - before + config.parts - 1) // config.parts
                before = (before - (end - begin)) & (config.parts - 1)
            stage, phase = self.mainloop(sums, count, stage, phase)
            # in the loop, so that what follows is not computed before it, and kept
            warpgroup = cute.arch.make_warp_uniform(ptx.pin(warpgroup))
            own, turn = warpgroup % WARPGROUPS, warpgroup // WARPGROUPS
            here = ptx.pin(thread)
            row, column = self.corner(index, down)
            at = out, store_atom, store_view, output, own, here, (row, column + own * 64)
            if const_expr(config.sources > 1):
                given = own, sums, here, swapped
                if turn == 0 and part == own % config.split:
                    self.exchange.receive(*given, index + step < tiles)
                    self.store(sums, *at)
                else:
                    self.exchange.send(*given, part, turn)
            else:
                self.store(sums, *at)
            swapped = swapped ^ 1
        if const_expr(config.tma_store):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store(self, sums, out, atom, view, output, group, thread, corner):
        """A tile's rows of the output, and 64 columns, from ``corner`` on."""
        d, bias, alpha = output
        self.epilogue.scale(sums, bias, alpha, thread, corner[1])
        if const_expr(self.config.tma_store):
            self.epilogue.store(sums, out, atom, view, group, thread, corner)
        else:
            self.epilogue.store_each(sums, d, thread, corner)


def compile_config(config: Config):
    """The host function of a kernel, which takes tensors of any shape."""
    align = config.scale_row if config.async_scales else 1
    return compile_for(
        config.arch,
        Widened(config),
        any_tensor(cutlass.BFloat16, 2, 16, True),
        None,
        any_tensor(cutlass.Uint8, 2, 16, True),
        any_tensor(cutlass.Uint8, 2, align, True),
        any_source(config.out_dtype, config.tma_store),
        *any_added(config),
        Int32(1),
    )
