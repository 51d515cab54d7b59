# mypy: ignore-errors
"""bf16 times MXFP8, MXFP4 and NVFP4, at most 16 rows: as fast as memory gives what B has.

Reading B is all the time there is, so that nothing may stand between: each warp loads its own
stages by TMA, asks for the next one when it has read one, and waits for no other warp. The warps of
a block take turns along K; they have all of the block's rows of B, which it is alone to read, so
that what they read of A serves as many of them as there are registers for. B is widened in
registers (``widened_rows``) and multiplied by mma.sync, whose sums, of the output transposed, are
brought together in shared memory at the end, in an order that is always the same.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ..common.copies import Copies, Panels
from ..common.factor import any_added, factor_of
from ..common.following import follow, precede
from ..common.persistent import advance, meet
from ..common.tensor_specs import any_source, any_tensor, compile_for
from . import ptx, widened_ptx
from .decode_config import SCALE_ROW, Config
from .widened_config import BLOCK_K
from .widened_rows import Rows

__all__ = ["Decode", "compile_config"]

_PANEL = 64  # columns of A in rows of 128 bytes
_PANELS = BLOCK_K // _PANEL


class Decode:
    """The kernel of a :class:`Config` and the host code that launches it."""

    def __init__(self, config: Config):
        self.config = config
        self.groups = config.rows // 8  # of rows of A
        self.steps = config.b_rows // 16  # of rows of B

    def setup(self):
        """What needs a compiler that runs."""
        config = self.config
        self.b = Copies(cutlass.Uint8, (config.b_rows, config.row_bytes), config.slots)
        box, rows = (config.rows, _PANEL), config.loaded_rows
        self.a = Panels(cutlass.BFloat16, box, config.slots, _PANELS, rows=rows)
        self.scales = Copies(
            cutlass.Uint8, (config.b_rows, SCALE_ROW), config.slots, swizzled=False
        )
        self.copies = [self.b, self.a, self.scales]
        self.rows = Rows(config.format, self.steps)

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, d, bias, alpha, multiprocessors, stream):
        """Launch. ``a`` (M, K) bf16, ``b`` (N, K) as bytes, ``b_scale`` (N, K / block); ``d``
        (M, N); ``bias`` (N,) and ``alpha``, or None. M is ``rows`` at most; there is no
        ``a_scale``, and ``multiprocessors`` take as many blocks of threads as they can."""
        self.setup()
        loaded = zip(self.copies, (b, a, b_scale), strict=True)
        loads = [each.describe(tensor) for each, tensor in loaded]
        self.kernel(
            [pair[0] for pair in loads],
            [pair[1] for pair in loads],
            (d, bias, alpha),
            cute.ceil_div(b.shape[1], self.config.row_bytes),
        ).launch(
            grid=(cute.ceil_div(b.shape[0], self.config.b_rows), 1, 1),
            block=(32 * self.config.warps, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, atoms, views, output, blocks):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator()
        tiles = [each.allocate(memory) for each in self.copies]
        barriers = memory.allocate_array(cutlass.Int64, config.slots)
        if const_expr(config.unused_shared):
            memory.allocate_array(cutlass.Uint8, config.unused_shared)
        full = barriers + warp * config.stages
        if warp == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in range_constexpr(config.slots):
                    cute.arch.mbarrier_init(barriers + i, 1)
            cute.arch.mbarrier_init_fence()
        self.a.clear(tiles[1], 32 * config.warps)
        meet(1)
        follow()

        column = cute.arch.block_idx()[0] * config.b_rows
        place = atoms, views, tiles, full, warp, column, blocks
        for i in range_constexpr(config.stages):
            self.fill(place, i * config.warps + warp, Int32(i))
        sums = [cute.make_rmem_tensor((4 * self.groups,), Float32) for _ in range(self.steps)]
        for each in sums:
            each.fill(0.0)
        self.rows.start()
        self.rows.seen.fill(0)
        self.multiply(sums, place)
        precede()
        self.rows.poison(sums)
        self.store(sums, tiles[0], warp, column, output)

    @cute.jit
    def fill(self, place, block, stage):
        """Ask for a K block, if there is one: a warp's work."""
        atoms, views, tiles, full, warp, column, blocks = place
        config = self.config
        if block < blocks:
            barrier, slot = full + stage, warp * config.stages + stage
            if cute.arch.lane_idx() == 0:
                ptx.expect(barrier.toint(), sum(each.moved for each in self.copies))
            positions = [
                (column, block * config.row_bytes),
                (Int32(0), block * BLOCK_K),
                (column, block * config.scale_bytes // SCALE_ROW * SCALE_ROW),
            ]
            for i in range_constexpr(len(positions)):
                self.copies[i].load(atoms[i], views[i], tiles[i], slot, positions[i], barrier)

    @cute.jit
    def multiply(self, sums, place):
        """Add all K blocks of a warp."""
        config, (_, _, tiles, full, warp, _, blocks) = self.config, place
        lane = cute.arch.lane_idx()
        row, part = lane // 4, lane % 4
        addresses = [each.iterator.toint() for each in tiles]
        b = ptx.pin(addresses[0] + self.rows.place(row, part))
        panel = part // 2 * (self.a.nbytes // _PANELS) + row * 128
        a = ptx.pin(addresses[1] + panel + ((part % 2 * 4) ^ row) * 16)
        scales = ptx.pin(addresses[2] + row * SCALE_ROW + part * self.rows.scale_bytes)
        stage, phase = Int32(0), Int32(0)
        for block in range(warp, blocks, config.warps):
            cute.arch.mbarrier_wait(full + stage, phase)
            slot = warp * config.stages + stage
            of_block = block * config.scale_bytes % SCALE_ROW
            self.add(
                sums,
                b + slot * self.b.nbytes,
                a + slot * self.a.nbytes,
                scales + slot * self.scales.nbytes + of_block,
            )
            cute.arch.sync_warp()
            self.fill(place, block + config.slots, stage)
            stage, phase = advance(stage, phase, config.stages)

    def add(self, sums, b, a, scales) -> None:
        """A K block, given by addresses of what a thread has of it."""
        nbytes, own = self.config.row_bytes, self.rows.scale_bytes
        rows = [(16 * step, 16 * step + 8) for step in range(self.steps)]
        factors = [
            self.rows.factors(*(widened_ptx.load_small(scales, r * SCALE_ROW, own) for r in pair))
            for pair in rows
        ]
        at_once = 2 * 64 // nbytes  # units of 16 bytes of a row
        for chunk in range(2 // at_once):
            words = [
                [widened_ptx.load_words(b ^ (16 * chunk), r * nbytes, 4) for r in pair]
                for pair in rows
            ]
            for i in range(at_once):
                unit = chunk * at_once + i
                right = [
                    [self.right(a, 2 * unit + octet, group) for group in range(self.groups)]
                    for octet in range(2)
                ]
                count = 4 // at_once
                for step in range(self.steps):
                    low, high = (row[i * count :][:count] for row in words[step])
                    left = self.rows.widen(low + high, factors[step], step, unit)
                    self.products(sums[step], left, right)

    def right(self, a, octet: int, group: int) -> list:
        """Eight columns of K of a row of A."""
        return widened_ptx.load_words(a ^ (16 * octet), 1024 * group, 4)

    def products(self, sums, left: list, right: list) -> None:
        """A unit of 16 rows of B by all rows of A."""
        for k in range(4):
            for group in range(self.groups):
                pair = right[k // 2][group][k % 2 * 2 :][:2]
                where = range(4 * group, 4 * group + 4)
                own = [sums[i] for i in where]
                for i, value in zip(
                    where, widened_ptx.mma(own, left[4 * k : 4 * k + 4], pair), strict=True
                ):
                    sums[i] = value

    @cute.jit
    def store(self, sums, tiles, warp, column, output):
        """Bring the sums of all warps together, where B was, and store ``alpha * sum + bias``."""
        config, (d, bias, alpha) = self.config, output
        thread = cute.arch.thread_idx()[0]
        each = self.steps * self.groups * 128  # sums of a warp
        cute.arch.sync_threads()
        place = tiles.iterator.toint() + warp * (4 * each) + thread % 32 * 16
        for step in range_constexpr(self.steps):
            for group in range_constexpr(self.groups):
                own = [sums[step][4 * group + i] for i in range(4)]
                ptx.store_floats(place, 512 * (step * self.groups + group), own)
        cute.arch.sync_threads()
        for i in range_constexpr(-(-each // (32 * config.warps))):
            index = i * (32 * config.warps) + thread
            # neighbours store neighbours: columns of the output, then the next row
            r, c = index // config.b_rows, index % config.b_rows
            lane = c % 8 * 4 + r % 8 // 2
            of_lane = c % 16 // 8 * 2 + r % 2
            at = ((c // 16 * self.groups + r // 8) * 32 + lane) * 4 + of_lane
            if index < each and r < d.shape[0] and column + c < d.shape[1]:
                total, found = Float32(0), tiles.iterator.toint() + at * 4
                for other in range_constexpr(config.warps):
                    total = total + ptx.load_floats(found, other * (4 * each))[0]
                if const_expr(config.gain != 1):
                    total = total * Float32(config.gain)
                if const_expr(alpha is not None):
                    total = total * factor_of(alpha)
                if const_expr(bias is not None):
                    total = total + Float32(bias[column + c])
                if const_expr(config.accumulate):
                    total = total + Float32(d[r, column + c])
                d[r, column + c] = d.element_type(total)


def compile_config(config: Config):
    """The host function of a kernel, which takes tensors of any shape."""
    return compile_for(
        config.arch,
        Decode(config),
        any_tensor(cutlass.BFloat16, 2, 16, True),
        None,
        any_tensor(cutlass.Uint8, 2, 16, True),
        any_tensor(cutlass.Uint8, 2, 16, True),
        any_source(config.out_dtype, False),
        *any_added(config),
        Int32(1),
    )
