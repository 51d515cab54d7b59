# mypy: ignore-errors
"""FP8 (M, K) with scales 1 x 128 by MXFP4 (N, K), at FP8's rate and half its bytes.

As ``kernel``, but B is made E4M3 by a warpgroup of its own, which takes it from slots to which it
is loaded as it is in memory: E2M1 times a power of two is exact in E4M3. What is a factor of 128 x
128 elements, and how often they are multiplied, a list says (``k_blocks``).
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ..common import shared
from ..common.copies import Copies, Panels, TmaTiles
from ..common.pdl import pdl_wait
from ..common.pipeline import Pipeline
from ..common.promotion import promote_l2
from ..common.tensor_specs import any_tensor
from ..common.tile_ring import TileRing
from .config import BLOCK_K
from .epilogue import Epilogue
from .fp8_gemm import first_scale
from .grouped_scheduler import TileFinder
from .k_blocks import KBlocks
from .kernel import Consumer, Gemm, Operand, gemm_host_function
from .upcast_config import A_BOX, B_ROWS, RAW_SLOTS, SCALE_WORDS, UPCAST_REGISTERS, UpcastConfig
from .upcast_mainloop import UpcastMainloop
from .upcast_roles import ALoader, BLoader, RawB, Upcaster

__all__ = ["UpcastGemm", "host_function"]


class UpcastGemm(Gemm):
    """The kernel of an :class:`UpcastConfig` and the host code that launches it."""

    def __init__(self, config: UpcastConfig):
        rows, stages = config.tile[0], config.stages
        a = Copies(cutlass.Uint8, (rows, BLOCK_K), stages, rows=config.loaded_rows)
        if config.rows_grouped:
            scale = Panels(Float32, (1, A_BOX), stages, config.a_boxes, swizzled=False)
        else:
            scale = Copies(Float32, (1, rows), stages, swizzled=False)
        operands = (
            Operand(a, lambda tile, k_block: (tile.a_row, k_block * BLOCK_K)),
            Operand(scale, lambda tile, k_block: (k_block, first_scale(config, tile))),
        )
        super().__init__(config, operands, UpcastMainloop)

    @property
    def raw(self) -> tuple[Copies, Copies]:
        """B as it is in memory, and its scales."""
        return (
            Copies(cutlass.Uint8, (B_ROWS, BLOCK_K // 2), RAW_SLOTS, swizzled=False),
            Copies(Int32, (1, SCALE_WORDS), RAW_SLOTS, swizzled=False),
        )

    @cute.jit
    def __call__(
        self,
        a,
        a_scale,
        b,
        b_scale,
        k_blocks,
        d,
        bias,
        alpha,
        offsets,
        supergroup,
        multiprocessors,
        stream,
    ):
        """Launch. ``a`` (M, K) and ``b`` (N, K / 2), or (groups * N, K / 2), as bytes; ``a_scale``
        (K / 128, M padded to 4); ``b_scale`` (lists, K blocks * 128) and ``k_blocks`` (lists,
        length) as ``k_blocks_kernel`` makes them; the rest as of ``Fp8Gemm``."""
        loads = [
            each.copies.describe(tensor)
            for each, tensor in zip(self.operands, (a, a_scale), strict=True)
        ]
        loads[0] = promote_l2(loads[0][0]), loads[0][1]
        loads += [
            copies.describe(tensor) for copies, tensor in zip(self.raw, (b, b_scale), strict=True)
        ]
        k_count = cute.ceil_div(a.shape[1], BLOCK_K)
        groups = (offsets, supergroup) if self.config.grouped else None
        rest = k_count, groups, multiprocessors, stream
        self.launch(loads, k_blocks, (d, bias, alpha), *rest)

    @cute.kernel
    def kernel(self, atoms, views, store_atom, store_view, entries, output, k_count, groups):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # shared memory
        memory = cutlass.memory.SmemAllocator()
        copies = [each.copies for each in self.operands]
        loads = [TmaTiles(copies[0], atoms[0], views[0], copies[0].allocate(memory))]
        upcast = shared.allocate(memory, config.stages * B_ROWS * BLOCK_K, 1024)
        boxes = None
        if const_expr(config.stores_tiles):
            boxes = TmaTiles(self.out, store_atom, store_view, self.out.allocate(memory))
        data, scales = (
            TmaTiles(copies, atom, view, copies.allocate(memory))
            for copies, atom, view in zip(self.raw, atoms[2:], views[2:], strict=True)
        )
        loads.append(TmaTiles(copies[1], atoms[1], views[1], copies[1].allocate(memory)))
        raw = RawB(Pipeline.allocate(memory, RAW_SLOTS, 1), data, scales)
        factor = shared.allocate(memory, config.stages * 16)
        pipeline = Pipeline.allocate(memory, config.stages, 1)
        ring = None
        if const_expr(config.grouped):
            ring = TileRing.allocate(memory)

        # barriers
        if warp == 0:
            for atom in [*atoms, *([store_atom] if config.stores_tiles else [])]:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in range_constexpr(config.stages):
                    cute.arch.mbarrier_init(pipeline.full + i, 1 + 4)
                    cute.arch.mbarrier_init(pipeline.empty + i, 4 * config.warpgroups)
                for i in range_constexpr(RAW_SLOTS):
                    cute.arch.mbarrier_init(raw.pipeline.full + i, 1)
                    cute.arch.mbarrier_init(raw.pipeline.empty + i, 4)
                if const_expr(config.grouped):
                    ring.init_barriers(2 + 4 + 4 * config.warpgroups)
            cute.arch.mbarrier_init_fence()
        copies[0].clear(loads[0].tiles, config.threads)
        cute.arch.sync_threads()
        pdl_wait()

        # roles
        schedule = self.scheduler.tiles(output[0], k_count, Int32(0), Int32(0), groups, ring)
        k_blocks = KBlocks(entries, Int32(output[0].shape[1]))
        low, high = config.registers
        if warp < 4:
            cute.arch.setmaxregister_decrease(low)
            if warp == 0:
                ALoader(pipeline, schedule, k_blocks, self.operands, loads, factor)()
            if warp == 1:
                BLoader(schedule, k_blocks, raw)()
            if const_expr(config.grouped):  # noqa: SIM102 - one is known when compiling
                if warp == 2:
                    TileFinder(schedule)()
        elif warp < 4 + 4 * config.warpgroups:
            cute.arch.setmaxregister_increase(high)
            epilogue = Epilogue(config, boxes, *output, self.mainloop.fills_registers)
            addresses = [loads[0].address, upcast, loads[1].address, factor]
            Consumer(
                config, pipeline, schedule, Int32(0), addresses, self.mainloop, epilogue, None
            )()
        else:
            cute.arch.setmaxregister_decrease(UPCAST_REGISTERS)
            Upcaster(config, pipeline, schedule, k_blocks, raw, upcast)()


def host_function(config: UpcastConfig):
    """The host function of a kernel, which takes tensors of any shape."""
    return gemm_host_function(
        UpcastGemm(config),
        any_tensor(cutlass.Uint8, 2, 16, True),
        any_tensor(Float32, 2, 16, True),
        any_tensor(cutlass.Uint8, 2, 16, True),
        any_tensor(Int32, 2, 16, True),
        any_tensor(Int32, 2, 16, True),
    )
