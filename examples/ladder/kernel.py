# mypy: ignore-errors
"""The ladder's short kernels: FP8 with fp32 scales, A (M, K) 1 x 128 and B (N, K) 128 x 128.

As a kernel is first written: all warps of a CTA load a K block, multiply it, scale the
partial sum and add it, for one tile. What the product's kernel does otherwise is in ``kernel``.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync

from blockscale.kernels.common.copies import Copies, TmaTiles
from blockscale.kernels.common.promotion import promote_l2
from blockscale.kernels.common.tensor_specs import HostFunction, any_source, any_tensor
from blockscale.kernels.sm90 import ptx
from blockscale.kernels.sm90.config import BLOCK_K
from blockscale.kernels.sm90.epilogue import Epilogue

from .config import MMA_N, LadderConfig

__all__ = ["Ladder", "host_function"]

_ROWS = 64
_LINE = 32  # scales of B that TMA brings at once: places in shared memory are 128 bytes apart


class Ladder:
    """The kernel of a :class:`LadderConfig` and the host code that launches it."""

    def __init__(self, config: LadderConfig):
        self.config = config

    def setup(self):
        """Describe the tiles, which needs a compiler that runs."""
        config = self.config
        stages, stored = config.stages, config.stored
        self.a = Copies(cutlass.Uint8, (_ROWS, BLOCK_K), stages)
        self.b = Copies(cutlass.Uint8, (config.columns, BLOCK_K), stages)
        self.a_scale = Copies(Float32, (1, _ROWS), stages, swizzled=False)
        self.b_scale = Copies(Float32, (1, _LINE), stages * config.b_scales, swizzled=False)
        self.out = Copies(cutlass.BFloat16, (_ROWS, stored.box_columns), config.across)

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, d, stream):
        """Launch. ``a`` (M, K) and ``b`` (N, K) as bytes; ``a_scale`` (M, K / 128), or transposed
        with M padded to 4; ``b_scale`` (N / 128, K / 128); ``d`` (M, N) bf16.
        """
        self.setup()
        config = self.config
        loads = [self.a.describe(a), self.b.describe(b)]
        if const_expr(config.promotion == 256):
            loads[1] = promote_l2(loads[1][0]), loads[1][1]
        if const_expr("b" in config.staged):
            loads.append(self.b_scale.describe(self.line(b_scale)))
        if const_expr("a" in config.staged):
            loads.append(self.a_scale.describe(a_scale))
        store_atom, store_view = self.out.describe(d, cpasync.CopyBulkTensorTileS2GOp())
        self.kernel(
            [pair[0] for pair in loads],
            [pair[1] for pair in loads],
            store_atom,
            store_view,
            a_scale,
            b_scale,
            d.shape[0],
            cute.ceil_div(a.shape[1], BLOCK_K),
        ).launch(
            grid=(
                cute.ceil_div(d.shape[0], _ROWS),
                cute.ceil_div(d.shape[1], config.columns),
                1,
            ),
            block=(config.threads, 1, 1),
            stream=stream,
        )

    def line(self, scales):
        """All scales of B as one row: TMA loads from any place in a row, but not any row."""
        count = (scales.shape[0] - 1) * scales.stride[0] + scales.shape[1]
        apart = (count + 3) // 4 * 4
        return cute.make_tensor(
            scales.iterator, cute.make_layout((1, Int32(count)), stride=(Int64(apart), 1))
        )

    @cute.kernel
    def kernel(self, atoms, views, store_atom, store_view, a_scale, b_scale, m, k_blocks):
        config = self.config
        thread = cute.arch.thread_idx()[0]
        group = cute.arch.make_warp_uniform(thread // 128)
        warp = cute.arch.make_warp_uniform(thread // 32)
        thread = ptx.pin(thread % 128)
        tile_row, tile_column, _ = cute.arch.block_idx()
        row, column = tile_row * _ROWS, tile_column * config.columns

        memory = cutlass.memory.SmemAllocator()
        copies = [self.a, self.b, self.b_scale, self.a_scale][: len(atoms)]
        tiles = [each.allocate(memory) for each in copies]
        out = self.out.allocate(memory)
        full = memory.allocate_array(cutlass.Int64, config.stages)
        if warp == 0:
            for atom in [*atoms, store_atom]:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in range_constexpr(config.stages):
                    cute.arch.mbarrier_init(full + i, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        given = copies, atoms, views, tiles, full, b_scale, row, column, warp, k_blocks
        for i in range_constexpr(config.ahead):
            self.load(given, Int32(i))
        shared = [each.iterator.toint() for each in tiles]
        at = ptx.pin(thread // 32 * 16 + thread % 32 // 4)  # the first of a thread's two rows
        places = shared, a_scale, b_scale, m, row, column, group, at
        partial_acc = cute.make_rmem_tensor((MMA_N // 2,), Float32)
        partial_acc.fill(0.0)
        acc = [cute.make_rmem_tensor((MMA_N // 2,), Float32) for _ in range(config.mmas)]
        for each in acc:
            each.fill(0.0)
        for k_block in range(k_blocks):
            self.add(acc, partial_acc, given, places, k_block)
        columns = config.columns // config.across
        where = group, thread, row, column + group * columns
        boxes = TmaTiles(self.out, store_atom, store_view, out)
        Epilogue(config.stored, boxes, None).store(acc, *where)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def add(self, acc, partial_acc, given, places, k_block):
        """Multiply a K block and add it."""
        config, full = self.config, given[4]
        stage, phase = k_block % config.stages, k_block // config.stages % 2
        if const_expr(config.ahead == 0):
            self.load(given, k_block)
        column_scales, row_scales = None, None
        if const_expr("b" not in config.staged):
            column_scales = self.column_scales(places, stage, k_block)
        if const_expr(config.prefetch):
            row_scales = self.row_scales(places, stage, k_block)
        cute.arch.mbarrier_wait(full + stage, phase)
        if const_expr("b" in config.staged):
            column_scales = self.column_scales(places, stage, k_block)
        if const_expr("a" in config.staged):
            row_scales = self.row_scales(places, stage, k_block)
        for mma in range_constexpr(config.mmas):
            self.products(partial_acc, places, stage, mma)
            ptx.wgmma_wait_group(0)
            if const_expr(mma == config.mmas - 1):
                cute.arch.sync_threads()  # no warp reads the stage any more
                if const_expr(config.ahead > 0):
                    self.load(given, k_block + config.ahead)
            if const_expr(row_scales is None):
                row_scales = self.row_scales(places, stage, k_block)
            self.promote(acc[mma], partial_acc, row_scales, column_scales[mma])

    @cute.jit
    def load(self, given, k_block):
        """Ask for a K block, if there is one."""
        copies, atoms, views, tiles, full, b_scale, row, column, warp, k_blocks = given
        config = self.config
        nbytes = self.a.nbytes + self.b.nbytes
        nbytes += config.b_scales * self.b_scale.nbytes if "b" in config.staged else 0
        nbytes += self.a_scale.nbytes if "a" in config.staged else 0
        stage, k = k_block % config.stages, k_block * BLOCK_K
        barrier = full + stage
        if warp == 0 and k_block < k_blocks:
            with cute.arch.elect_one():
                ptx.mbarrier_arrive_expect_tx(barrier.toint(), nbytes)
            wanted = [(0, stage, (row, k)), (1, stage, (column, k))]
            if const_expr("b" in config.staged):
                for i in range_constexpr(config.b_scales):
                    place = self.place(b_scale, column // MMA_N + i, k_block)
                    wanted.append((2, stage * config.b_scales + i, (0, place // 4 * 4)))
            if const_expr("a" in config.staged):
                wanted.append((3, stage, (k_block, row)))
            for i, target, position in wanted:
                copies[i].load(atoms[i], views[i], tiles[i], target, position, barrier)

    def place(self, b_scale, row, k_block):
        """Where a scale of B is in the line of all, of which TMA loads from every fourth on."""
        return row * Int32(b_scale.stride[0]) + k_block

    def products(self, partial_acc, places, stage, mma: int) -> None:
        """Start the partial sum of 64 rows and 128 columns."""
        config, (shared, *_, group, _) = self.config, places
        first = (group * config.mmas + mma) * MMA_N
        a = ptx.wgmma_descriptor(shared[0] + stage * (_ROWS * BLOCK_K))
        b = ptx.wgmma_descriptor(shared[1] + (stage * config.columns + first) * BLOCK_K)
        a, b = (cute.arch.make_warp_uniform(each) for each in (a, b))
        for i, value in enumerate(ptx.wgmma_fp8([partial_acc[i] for i in range(MMA_N // 2)], a, b)):
            partial_acc[i] = value

    def row_scales(self, places, stage, k_block) -> list:
        """The scales of A of a thread's two rows."""
        shared, a_scale, _, m, row, _, _, at = places
        if "a" in self.config.staged:
            address = shared[3] + (stage * _ROWS + at) * 4
            return [ptx.ld_shared(address, offset)[0] for offset in (0, 32)]
        rows = [cutlass.min(row + at + offset, m - 1) for offset in (0, 8)]
        return [a_scale[(k_block, r) if self.config.transposed else (r, k_block)] for r in rows]

    def column_scales(self, places, stage, k_block) -> list:
        """The scales of B, for each of a warpgroup's wgmmas."""
        config, (shared, _, b_scale, _, _, column, group, _) = self.config, places
        first = group * config.mmas
        rows = [column // MMA_N + first + i for i in range(config.mmas)]
        if "b" in config.staged:
            found = []
            for i, r in enumerate(rows):
                line = shared[2] + (stage * config.b_scales + first + i) * _LINE * 4
                found += ptx.ld_shared(line + self.place(b_scale, r, k_block) % 4 * 4, 0)
            return found
        last = b_scale.shape[0] - 1
        return [b_scale[cutlass.min(r, last), k_block] for r in rows]

    def promote(self, acc, partial_acc, row_scales: list, column_scale) -> None:
        """Scale a partial accumulator and add it, in fp32."""
        scales = [ptx.mul(each, column_scale) for each in row_scales]
        for first in range(0, MMA_N // 2, 4):
            where = range(first, first + 4)
            added = ptx.fma4([acc[i] for i in where], [partial_acc[i] for i in where], scales)
            for i, value in zip(where, added, strict=True):
                acc[i] = value


def host_function(config: LadderConfig):
    """The host function of a kernel, which takes tensors of any shape."""
    spaced = config.transposed
    return HostFunction(
        config.arch,
        Ladder(config),
        any_tensor(cutlass.Uint8, 2, 16, True),
        any_tensor(Float32, 2, 16 if spaced else 4, spaced),
        any_tensor(cutlass.Uint8, 2, 16, True),
        any_tensor(Float32, 2, 16 if "b" in config.staged else 4),
        any_source(config.stored.out_dtype, True),
    )
