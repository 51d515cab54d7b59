# mypy: ignore-errors
"""The ladder's short kernels: FP8 with fp32 scales, A (M, K) 1 x 128 and B (N, K) 128 x 128.

As a kernel is first written: all warps of a block of threads load a K block, multiply it, scale the
partial sum and add it, for one tile. What the product's kernel does otherwise is in ``kernel``.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ..common.copies import Copies, TmaTiles
from ..common.promotion import promote_l2
from ..common.tensor_specs import any_source, any_tensor, compile_for
from . import ptx
from .config import BLOCK_K
from .epilogue import Epilogue
from .ladder_config import BATCH, LadderConfig

__all__ = ["Ladder", "compile_config"]

_ROWS = 64
_LINE = 32  # scales of B that TMA brings at once: places in shared memory are 128 bytes apart


class Ladder:
    """The kernel of a :class:`LadderConfig` and the host code that launches it."""

    def __init__(self, config: LadderConfig):
        self.config = config

    def setup(self):
        """What needs a compiler that runs."""
        config = self.config
        slots, stored = config.slots, config.stored
        self.a = Copies(cutlass.Uint8, (_ROWS, BLOCK_K), slots)
        self.b = Copies(cutlass.Uint8, (config.columns, BLOCK_K), slots)
        self.a_scale = Copies(Float32, (1, _ROWS), slots, swizzled=False)
        self.b_scale = Copies(Float32, (1, _LINE), slots * config.b_scales, swizzled=False)
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
    def kernel(self, atoms, views, store_atom, store_view, a_scale, b_scale, m, blocks):
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
        full = memory.allocate_array(cutlass.Int64, config.slots)
        if warp == 0:
            for atom in [*atoms, store_atom]:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in range_constexpr(config.slots):
                    cute.arch.mbarrier_init(full + i, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        given = copies, atoms, views, tiles, full, b_scale, row, column, warp, blocks
        for i in range_constexpr(config.ahead):
            self.load(given, Int32(i))
        shared = [each.iterator.toint() for each in tiles]
        at = ptx.pin(thread // 32 * 16 + thread % 32 // 4)  # the first of a thread's two rows
        places = shared, a_scale, b_scale, m, row, column, group, at
        parts = cute.make_rmem_tensor((BATCH // 2,), Float32)
        parts.fill(0.0)
        sums = [cute.make_rmem_tensor((BATCH // 2,), Float32) for _ in range(config.batches)]
        for each in sums:
            each.fill(0.0)
        for block in range(blocks):
            self.add(sums, parts, given, places, block)
        columns = config.columns // config.across
        where = group, thread, row, column + group * columns
        boxes = TmaTiles(self.out, store_atom, store_view, out)
        Epilogue(config.stored, boxes, None).store(sums, *where)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def add(self, sums, parts, given, places, block):
        """Multiply a K block and add it."""
        config, full = self.config, given[4]
        slot, phase = block % config.slots, block // config.slots % 2
        if const_expr(config.ahead == 0):
            self.load(given, block)
        column_scales, row_scales = None, None
        if const_expr("b" not in config.staged):
            column_scales = self.column_scales(places, slot, block)
        if const_expr(config.prefetch):
            row_scales = self.row_scales(places, slot, block)
        cute.arch.mbarrier_wait(full + slot, phase)
        if const_expr("b" in config.staged):
            column_scales = self.column_scales(places, slot, block)
        if const_expr("a" in config.staged):
            row_scales = self.row_scales(places, slot, block)
        for batch in range_constexpr(config.batches):
            self.products(parts, places, slot, batch)
            ptx.wgmma_wait_group(0)
            if const_expr(batch == config.batches - 1):
                cute.arch.sync_threads()  # nobody needs the slot
                if const_expr(config.ahead > 0):
                    self.load(given, block + config.ahead)
            if const_expr(row_scales is None):
                row_scales = self.row_scales(places, slot, block)
            self.promote(sums[batch], parts, row_scales, column_scales[batch])

    @cute.jit
    def load(self, given, block):
        """Ask for a K block, if there is one."""
        copies, atoms, views, tiles, full, b_scale, row, column, warp, blocks = given
        config = self.config
        nbytes = self.a.nbytes + self.b.nbytes
        nbytes += config.b_scales * self.b_scale.nbytes if "b" in config.staged else 0
        nbytes += self.a_scale.nbytes if "a" in config.staged else 0
        slot, k = block % config.slots, block * BLOCK_K
        barrier = full + slot
        if warp == 0 and block < blocks:
            with cute.arch.elect_one():
                ptx.mbarrier_arrive_expect_tx(barrier.toint(), nbytes)
            wanted = [(0, slot, (row, k)), (1, slot, (column, k))]
            if const_expr("b" in config.staged):
                for i in range_constexpr(config.b_scales):
                    place = self.place(b_scale, column // BATCH + i, block)
                    wanted.append((2, slot * config.b_scales + i, (0, place // 4 * 4)))
            if const_expr("a" in config.staged):
                wanted.append((3, slot, (block, row)))
            for i, target, position in wanted:
                copies[i].load(atoms[i], views[i], tiles[i], target, position, barrier)

    def place(self, b_scale, row, block):
        """Of a scale in the line of all, where TMA starts at every fourth."""
        return row * Int32(b_scale.stride[0]) + block

    def products(self, parts, places, slot, batch: int) -> None:
        """Start the partial sum of 64 rows and 128 columns."""
        config, (shared, *_, group, _) = self.config, places
        first = (group * config.batches + batch) * BATCH
        a = ptx.wgmma_descriptor(shared[0] + slot * (_ROWS * BLOCK_K))
        b = ptx.wgmma_descriptor(shared[1] + (slot * config.columns + first) * BLOCK_K)
        a, b = (cute.arch.make_warp_uniform(each) for each in (a, b))
        for i, value in enumerate(ptx.wgmma_fp8([parts[i] for i in range(BATCH // 2)], a, b)):
            parts[i] = value

    def row_scales(self, places, slot, block) -> list:
        """Of A, for a thread's two rows."""
        shared, a_scale, _, m, row, _, _, at = places
        if "a" in self.config.staged:
            address = shared[3] + (slot * _ROWS + at) * 4
            return [ptx.ld_shared(address, offset)[0] for offset in (0, 32)]
        rows = [cutlass.min(row + at + offset, m - 1) for offset in (0, 8)]
        return [a_scale[(block, r) if self.config.transposed else (r, block)] for r in rows]

    def column_scales(self, places, slot, block) -> list:
        """Of B, for each of a warpgroup's batches."""
        config, (shared, _, b_scale, _, _, column, group, _) = self.config, places
        first = group * config.batches
        rows = [column // BATCH + first + i for i in range(config.batches)]
        if "b" in config.staged:
            found = []
            for i, r in enumerate(rows):
                line = shared[2] + (slot * config.b_scales + first + i) * _LINE * 4
                found += ptx.ld_shared(line + self.place(b_scale, r, block) % 4 * 4, 0)
            return found
        last = b_scale.shape[0] - 1
        return [b_scale[cutlass.min(r, last), block] for r in rows]

    def promote(self, sums, parts, row_scales: list, column_scale) -> None:
        """Scale a partial sum and add it, in fp32."""
        scales = [ptx.mul(each, column_scale) for each in row_scales]
        for first in range(0, BATCH // 2, 4):
            where = range(first, first + 4)
            added = ptx.fma4([sums[i] for i in where], [parts[i] for i in where], scales)
            for i, value in zip(where, added, strict=True):
                sums[i] = value


def compile_config(config: LadderConfig):
    """The host function of a kernel, which takes tensors of any shape."""
    spaced = config.transposed
    return compile_for(
        config.arch,
        Ladder(config),
        any_tensor(cutlass.Uint8, 2, 16, True),
        any_tensor(Float32, 2, 16 if spaced else 4, spaced),
        any_tensor(cutlass.Uint8, 2, 16, True),
        any_tensor(Float32, 2, 16 if "b" in config.staged else 4),
        any_source(config.stored.out_dtype, True),
    )
