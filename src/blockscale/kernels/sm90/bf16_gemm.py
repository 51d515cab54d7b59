# mypy: ignore-errors
"""bf16: A (M, K) times B (N, K), each with either of its dimensions contiguous.

What ``kernel`` wants to know: what is loaded, and the mainloop. The tensor cores add to a tile's
accumulators themselves: the wgmmas of a K block wait behind those of the one before it, whose stage
is free when these have finished.
"""

from __future__ import annotations

import cutlass
from cutlass import cute, range_constexpr

from ..common.copies import Copies, Panels
from ..common.pipeline import Pipeline
from ..common.promotion import promote_l2
from ..common.tensor_specs import any_tensor
from . import ptx
from .bf16_config import BLOCK_K, Bf16Config
from .kernel import Gemm, Operand, gemm_host_function
from .product_config import ROW

__all__ = ["Bf16Gemm", "host_function"]

_STEP = 16  # columns of K of a wgmma


class Bf16Gemm:
    """The kernel of a :class:`Bf16Config` and the host code that launches it."""

    def __init__(self, config: Bf16Config):
        down, across = config.cluster
        a = self.copies(config, config.tile[0], config.a_major, across)
        b = self.copies(config, config.tile[1], config.b_major, down)
        operands = (
            Operand(a, lambda tile, k_block: self.origin(config.a_major, tile.a_row, k_block)),
            Operand(b, lambda tile, k_block: self.origin(config.b_major, tile.column, k_block)),
        )
        self.config, self.gemm = config, Gemm(config, operands, Mainloop)

    def copies(self, config: Bf16Config, rows: int, major: str, shares: int) -> Copies:
        """Tiles of a K block: rows of it, or panels with a row for each element along K."""
        kind, stages = cutlass.BFloat16, config.stages
        if major == "k":
            return Copies(kind, (rows, BLOCK_K), stages, shares=shares)
        return Panels(kind, (BLOCK_K, ROW // 2), stages, rows * 2 // ROW, shares=shares)

    def origin(self, major: str, row, k_block) -> tuple:
        k = k_block * BLOCK_K
        return (row, k) if major == "k" else (k, row)

    @cute.jit
    def __call__(self, a, b, d, bias, alpha, offsets, supergroup, multiprocessors, stream):
        """Launch. ``a`` (M, K) and ``b`` (N, K), or transposed where K is not contiguous; ``d`` (M,
        N); ``bias`` (N,) and ``alpha``, or None. Where columns are grouped, ``d`` is (groups * M,
        N), ``offsets`` (groups,) int32, and ``supergroup`` as of ``RowGroups``; else None.
        """
        operands = zip(self.gemm.operands, (a, b), strict=True)
        loads = [operand.copies.describe(tensor) for operand, tensor in operands]
        loads = [(promote_l2(atom), view) for atom, view in loads]
        k = a.shape[1 if self.config.a_major == "k" else 0]
        k_blocks = cute.ceil_div(k, BLOCK_K)
        groups = (offsets, supergroup) if self.config.grouped else None
        rest = k_blocks, groups, multiprocessors, stream
        self.gemm.launch(loads, None, (d, bias, alpha), *rest)


class Mainloop:
    """Adds products of K blocks to a warpgroup's accumulators.

    Takes the warpgroup's first row in the CTA's tile, and addresses in shared memory.
    """

    fills_registers = False

    def __init__(self, config: Bf16Config, pipeline: Pipeline, row, thread, a, b):
        self.config, self.pipeline, self.lane = config, pipeline, thread % 32
        a = self.descriptor(a + row * ROW, config.a_major)
        b = self.descriptor(b, config.b_major)
        self.a, self.b = (cute.arch.make_warp_uniform(each) for each in (a, b))

    def descriptor(self, address, major: str):
        """Rows, or panels, which are as far apart as 64 rows of 128 bytes."""
        return ptx.wgmma_descriptor(address, 16 if major == "k" else BLOCK_K * ROW)

    @cute.jit
    def __call__(self, acc, tile, k_blocks, stage, phase):
        """Add ``k_blocks`` of a tile to ``acc``; the next stage and phase."""
        mma_tiles = self.config.mma_tiles
        before = stage
        for i in range(k_blocks):
            self.pipeline.consumer_wait(stage, phase)
            for j in range_constexpr(len(mma_tiles)):
                self.mma(acc[j], stage, *mma_tiles[j])
            ptx.wgmma_wait_group(len(mma_tiles))
            if i > 0:
                self.release(before)
            before = stage
            stage, phase = self.pipeline.consumer_next(stage, phase)
        for each in acc:
            self.finish(each)
        if k_blocks > 0:
            self.release(before)
        return stage, phase

    def mma(self, acc, stage, row_step: int, column_step: int) -> None:
        """Start the wgmmas of a K block."""
        config = self.config
        unit = ROW // 16  # of a descriptor, for a row
        a = self.a + stage * (config.tile[0] * unit) + row_step * 64 * unit
        b = self.b + stage * (config.tile[1] * unit) + column_step * config.mma_n * unit
        majors = config.a_major, config.b_major
        steps = [_STEP // 8 if major == "k" else _STEP * unit for major in majors]
        transposed = [major == "mn" for major in majors]
        values = [acc[i] for i in range(config.mma_n // 2)]
        for i, value in enumerate(ptx.wgmma_bf16(values, a, b, steps, transposed)):
            acc[i] = value

    def finish(self, acc) -> None:
        """Nobody may read them before."""
        for i, value in enumerate(
            ptx.wgmma_wait_all([acc[i] for i in range(self.config.mma_n // 2)])
        ):
            acc[i] = value

    def release(self, stage) -> None:
        barrier = (self.pipeline.empty + stage).toint()
        ptx.mbarrier_arrive_cluster(barrier, self.lane, self.config.multicast_ctas)


def host_function(config: Bf16Config):
    """The host function of a kernel, which takes tensors of any shape."""
    operands = [any_tensor(cutlass.BFloat16, 2, 16, True) for _ in range(2)]
    return gemm_host_function(Bf16Gemm(config), *operands)
