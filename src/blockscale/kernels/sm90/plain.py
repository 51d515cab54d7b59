# mypy: ignore-errors
"""bf16: A (M, K) times B (N, K), each with either of its dimensions contiguous.

The kernel of ``product``, whose tensor cores add to a tile's sums themselves: the wgmmas of a K
block wait behind those of the one before it, whose stage is free when these have finished.
"""

from __future__ import annotations

import cutlass
from cutlass import cute, range_constexpr

from ..common.copies import Copies, Panels
from ..common.promotion import promote_l2
from ..common.tensor_specs import any_tensor
from . import ptx
from .loop import Loop
from .plain_config import BLOCK_K, PlainConfig
from .product import Product, compile_product
from .product_config import ROW

__all__ = ["Plain", "compile_config"]

_STEP = 16  # columns of K of a wgmma


class Plain(Product):
    """The kernel of a :class:`PlainConfig` and the host code that launches it."""

    def setup(self):
        """What needs a compiler that runs."""
        config = self.config
        down, across = config.cluster
        self.copies = [
            self.operand(config.tile[0], config.a_major, across),
            self.operand(config.tile[1], config.b_major, down),
        ]
        self.mainloop = PlainLoop(config)

    def operand(self, rows: int, major: str, shares: int) -> Copies:
        """Tiles of a K block: rows of it, or panels with a row for each element along K."""
        kind, stages = cutlass.BFloat16, self.config.stages
        if major == "k":
            return Copies(kind, (rows, BLOCK_K), stages, shares=shares)
        return Panels(kind, (BLOCK_K, ROW // 2), stages, rows * 2 // ROW, shares=shares)

    @cute.jit
    def __call__(self, a, b, d, bias, alpha, multiprocessors, stream):
        """Launch. ``a`` (M, K) and ``b`` (N, K), or transposed where K is not contiguous; ``d`` (M,
        N); ``bias`` (N,) and ``alpha``, or None.
        """
        self.setup()
        loads = [each.describe(x) for each, x in zip(self.copies, (a, b), strict=True)]
        loads = [(promote_l2(atom), view) for atom, view in loads]
        k = a.shape[1 if self.config.a_major == "k" else 0]
        blocks = cute.ceil_div(k, BLOCK_K)
        self.launch(loads, None, (d, bias, alpha), blocks, multiprocessors, stream)

    def positions(self, row, column, block) -> list:
        k, config = block * BLOCK_K, self.config
        pairs = (row, config.a_major), (column, config.b_major)
        return [(first, k) if major == "k" else (k, first) for first, major in pairs]


class PlainLoop(Loop):
    config: PlainConfig

    def start(self, shared, full, empty, rows, thread) -> None:
        """``shared``: tiles of A and of B."""
        a, b = shared
        self.full, self.empty, self.lane = full, empty, thread % 32
        a = self.descriptor(a + rows * ROW, self.config.a_major)
        b = self.descriptor(b, self.config.b_major)
        self.a, self.b = (cute.arch.make_warp_uniform(each) for each in (a, b))

    def descriptor(self, address, major: str):
        """Rows, or panels, which are as far apart as 64 rows of 128 bytes."""
        return ptx.descriptor(address, 16 if major == "k" else BLOCK_K * ROW)

    @cute.jit
    def __call__(self, sums, blocks, stage, phase):
        """Add ``blocks`` K blocks to ``sums``; the next stage and phase."""
        before = stage
        for i in range(blocks):
            self.ring.wait(self.full, stage, phase)
            for j in range_constexpr(len(self.batches)):
                self.products(sums[j], stage, *self.batches[j])
            ptx.wait_products(len(self.batches))
            if i > 0:
                self.release(before)
            before = stage
            stage, phase = self.ring.next(stage, phase)
        for each in sums:
            self.finish(each)
        if blocks > 0:
            self.release(before)
        return stage, phase

    def products(self, sums, stage, row_step: int, column_step: int) -> None:
        """Start a batch."""
        config = self.config
        unit = ROW // 16  # of a descriptor, for a row
        a = self.a + stage * (config.tile[0] * unit) + row_step * 64 * unit
        b = self.b + stage * (config.tile[1] * unit) + column_step * config.batch * unit
        majors = config.a_major, config.b_major
        steps = [_STEP // 8 if major == "k" else _STEP * unit for major in majors]
        transposed = [major == "mn" for major in majors]
        values = [sums[i] for i in range(config.batch // 2)]
        for i, value in enumerate(ptx.wgmma_bf16(values, a, b, steps, transposed)):
            sums[i] = value

    def finish(self, sums) -> None:
        """Nobody may read them before."""
        for i, value in enumerate(ptx.finish([sums[i] for i in range(self.config.batch // 2)])):
            sums[i] = value


def compile_config(config: PlainConfig):
    """The host function of a kernel, which takes tensors of any shape."""
    operands = [any_tensor(cutlass.BFloat16, 2, 16, True) for _ in range(2)]
    return compile_product(Plain(config), *operands)
