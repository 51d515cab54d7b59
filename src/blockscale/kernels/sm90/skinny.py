# mypy: ignore-errors
"""bf16 times MXFP8, MXFP4 and NVFP4, at most 16 rows: as fast as memory gives what B has.

Reading B is all the time there is, so that nothing may stand between: each warp loads its own
stages by TMA, block scales too where it can (else threads read their own: ``skinny_scales``), asks
for the next one when it has read one, and waits for no other warp. The warps of
a CTA take turns along K; they have all of the CTA's rows of B, which it is alone to read, so that
what they read of A serves as many of them as there are registers for. B is dequantized in registers
(``dequant``) and multiplied by mma.sync, whose accumulators, of the output transposed, are
added up in shared memory at the end, in an order that is always the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ..common.copies import Copies, Panels, TmaTiles
from ..common.factor import any_added, factor_of
from ..common.pdl import pdl_launch_dependents, pdl_wait
from ..common.persistent import advance_pipeline, cluster_sync
from ..common.tensor_specs import HostFunction, any_source, any_tensor
from . import ptx
from .dequant import Rows, place
from .mixed_config import BLOCK_K
from .skinny_config import SCALE_ROW, Config
from .skinny_scales import HeldScales, StagedScales

__all__ = ["SkinnyGemm", "host_function"]

_PANEL = 64  # columns of A in rows of 128 bytes
_PANELS = BLOCK_K // _PANEL


class SkinnyGemm:
    """The kernel of a :class:`Config` and the host code that launches it."""

    def __init__(self, config: Config):
        self.config = config
        b, box = (config.b_rows, config.row_bytes), (config.rows, _PANEL)
        rows, scales = config.loaded_rows, (config.b_rows, SCALE_ROW)
        self.copies = [
            Copies(cutlass.Uint8, b, config.slots),
            Panels(cutlass.BFloat16, box, config.slots, _PANELS, rows=rows),
        ]
        if config.tma_scales:
            self.copies.append(Copies(cutlass.Uint8, scales, config.slots, swizzled=False))

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, d, bias, alpha, multiprocessors, stream):
        """Launch. ``a`` (M, K) bf16, ``b`` (N, K) as bytes, ``b_scale`` (N, K / block); ``d``
        (M, N); ``bias`` (N,) and ``alpha``, or None. M is ``rows`` at most; there is no
        ``a_scale``, and ``multiprocessors`` take as many CTAs as they can."""
        loaded = zip(self.copies, (b, a, b_scale)[: len(self.copies)], strict=True)
        loads = [each.describe(tensor) for each, tensor in loaded]
        atoms, views = zip(*loads, strict=True)
        k_blocks = cute.ceil_div(b.shape[1], self.config.row_bytes)
        self.kernel(atoms, views, b_scale, (d, bias, alpha), k_blocks).launch(
            grid=(cute.ceil_div(b.shape[0], self.config.b_rows), 1, 1),
            block=(32 * self.config.warps, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, atoms, views, b_scale, output, k_blocks):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # shared memory
        memory = cutlass.memory.SmemAllocator()
        tiles = [each.allocate(memory) for each in self.copies]
        barriers = memory.allocate_array(cutlass.Int64, config.slots)
        if const_expr(config.unused_shared):
            memory.allocate_array(cutlass.Uint8, config.unused_shared)
        loads = [TmaTiles(*each) for each in zip(self.copies, atoms, views, tiles, strict=True)]
        b, a = loads[:2]

        # barriers
        full = barriers + warp * config.stages
        if warp == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in range_constexpr(config.slots):
                    cute.arch.mbarrier_init(barriers + i, 1)
            cute.arch.mbarrier_init_fence()
        a.copies.clear(a.tiles, 32 * config.warps)
        cluster_sync(1)
        pdl_wait()

        # each warp loads, multiplies and stores
        column = cute.arch.block_idx()[0] * config.b_rows
        loader = Loader(config, loads, full, warp, column, k_blocks)
        for i in range_constexpr(config.stages):
            loader(i * config.warps + warp, Int32(i))
        b_tiles, a_tiles = config.mma_tiles
        acc = [cute.make_rmem_tensor((4 * a_tiles,), Float32) for _ in range(b_tiles)]
        for each in acc:
            each.fill(0.0)
        rows = Rows(config.format, b_tiles)
        rows.seen.fill(0)
        if const_expr(config.tma_scales):
            scales = StagedScales(config, loads[2], rows.scale_bytes)
        else:
            scales = HeldScales(config, b_scale, column, rows.scale_bytes)
        Mainloop(config, loader, rows, scales)(acc)
        pdl_launch_dependents()
        rows.poison(acc)
        Epilogue(config, b.address, warp, column, *output)(acc)


@dataclass(frozen=True)
class Loader:
    """Keeps a warp's stages filled. ``loads``: of B, of A, and of block scales if TMA loads them;
    ``full``: the warp's mbarriers; ``k_blocks``: of all warps."""

    config: Config
    loads: list[TmaTiles]
    full: Any
    warp: Any
    column: Any
    k_blocks: Any

    @cute.jit
    def __call__(self, k_block, stage):
        """Ask for a K block, if there is one."""
        config = self.config
        if k_block < self.k_blocks:
            barrier, slot = self.full + stage, self.warp * config.stages + stage
            if cute.arch.lane_idx() == 0:
                ptx.mbarrier_arrive_expect_tx(
                    barrier.toint(), sum(each.copies.moved for each in self.loads)
                )
            origins = (
                (self.column, k_block * config.row_bytes),
                (Int32(0), k_block * BLOCK_K),
                (self.column, k_block * config.scale_bytes // SCALE_ROW * SCALE_ROW),
            )
            for load, origin in zip(self.loads, origins[: len(self.loads)], strict=True):
                load.load(slot, origin, barrier)


@dataclass(frozen=True)
class Mainloop:
    """Adds the products of all K blocks of a warp."""

    config: Config
    loader: Loader
    rows: Rows
    scales: StagedScales | HeldScales

    @cute.jit
    def __call__(self, acc):
        config, loader = self.config, self.loader
        lane = cute.arch.lane_idx()
        row, part = lane // 4, lane % 4
        b, a = loader.loads[:2]
        b_tile, a_tile = b.copies.nbytes, a.copies.nbytes
        b = ptx.pin(b.address + place(row, part, config.row_bytes))
        panel = part // 2 * (a_tile // _PANELS) + row * 128
        a = ptx.pin(a.address + panel + ((part % 2 * 4) ^ row) * 16)
        stage, phase = Int32(0), Int32(0)
        self.scales.ask(loader.warp)
        for k_block in range(loader.warp, loader.k_blocks, config.warps):
            held = self.scales.take(k_block + config.warps)
            cute.arch.mbarrier_wait(loader.full + stage, phase)
            slot = loader.warp * config.stages + stage
            scales = self.scales.read(held, k_block, slot)
            self.add(acc, b + slot * b_tile, a + slot * a_tile, scales)
            cute.arch.sync_warp()
            loader(k_block + config.slots, stage)
            stage, phase = advance_pipeline(stage, phase, config.stages)

    def add(self, acc, b, a, scales) -> None:
        """A K block, given by addresses of what a thread has of it, and its scales of B."""
        nbytes = self.config.row_bytes
        b_tiles, a_tiles = self.config.mma_tiles
        rows = [(16 * tile, 16 * tile + 8) for tile in range(b_tiles)]
        factors = [self.rows.factors(*pair) for pair in scales]
        at_once = 2 * 64 // nbytes  # units of 16 bytes of a row
        for chunk in range(2 // at_once):
            words = [
                [ptx.ld_shared(b ^ (16 * chunk), r * nbytes, 4, Int32) for r in pair]
                for pair in rows
            ]
            for i in range(at_once):
                unit = chunk * at_once + i
                right = [
                    [self.right(a, 2 * unit + octet, tile) for tile in range(a_tiles)]
                    for octet in range(2)
                ]
                count = 4 // at_once
                for tile in range(b_tiles):
                    low, high = (row[i * count :][:count] for row in words[tile])
                    left = self.rows.widen(low + high, factors[tile], tile, unit)
                    self.mma(acc[tile], left, right)

    def right(self, a, octet: int, tile: int) -> list:
        """Eight columns of K of a row of A."""
        return ptx.ld_shared(a ^ (16 * octet), 1024 * tile, 4, Int32)

    def mma(self, acc, left: list, right: list) -> None:
        """A unit of 16 rows of B by all rows of A."""
        for k in range(4):
            for tile in range(self.config.mma_tiles[1]):
                pair = right[k // 2][tile][k % 2 * 2 :][:2]
                where = range(4 * tile, 4 * tile + 4)
                added = ptx.mma([acc[i] for i in where], left[4 * k : 4 * k + 4], pair)
                for i, value in zip(where, added, strict=True):
                    acc[i] = value


@dataclass(frozen=True)
class Epilogue:
    """Adds up the accumulators of all warps, where B was, at ``address``, and stores ``alpha * acc
    + bias``."""

    config: Config
    address: Any
    warp: Any
    column: Any
    d: Any
    bias: Any
    alpha: Any

    @cute.jit
    def __call__(self, acc):
        config, d, (b_tiles, a_tiles) = self.config, self.d, self.config.mma_tiles
        thread = cute.arch.thread_idx()[0]
        each = b_tiles * a_tiles * 128  # accumulators of a warp
        cute.arch.sync_threads()
        own = self.address + self.warp * (4 * each) + thread % 32 * 16
        for i in range_constexpr(b_tiles):
            for j in range_constexpr(a_tiles):
                values = [acc[i][4 * j + k] for k in range(4)]
                ptx.st_shared(own, values, 512 * (i * a_tiles + j))
        cute.arch.sync_threads()
        for i in range_constexpr(-(-each // (32 * config.warps))):
            index = i * (32 * config.warps) + thread
            # neighbours store neighbours: columns of the output, then the next row
            r, c = index // config.b_rows, index % config.b_rows
            lane = c % 8 * 4 + r % 8 // 2
            of_lane = c % 16 // 8 * 2 + r % 2
            at = ((c // 16 * a_tiles + r // 8) * 32 + lane) * 4 + of_lane
            if index < each and r < d.shape[0] and self.column + c < d.shape[1]:
                total, found = Float32(0), self.address + at * 4
                for other in range_constexpr(config.warps):
                    total = total + ptx.ld_shared(found, other * (4 * each))[0]
                if const_expr(config.gain != 1):
                    total = total * Float32(config.gain)
                if const_expr(self.alpha is not None):
                    total = total * factor_of(self.alpha)
                if const_expr(self.bias is not None):
                    total = total + Float32(self.bias[self.column + c])
                if const_expr(config.accumulate):
                    total = total + Float32(d[r, self.column + c])
                d[r, self.column + c] = d.element_type(total)


def host_function(config: Config):
    """The host function of a kernel, which takes tensors of any shape."""
    return HostFunction(
        config.arch,
        SkinnyGemm(config),
        any_tensor(cutlass.BFloat16, 2, 16, True),
        None,
        any_tensor(cutlass.Uint8, 2, 16, True),
        any_tensor(cutlass.Uint8, 2, 16 if config.tma_scales else 1, True),
        any_source(config.out_dtype, False),
        *any_added(config),
        Int32(1),
    )
