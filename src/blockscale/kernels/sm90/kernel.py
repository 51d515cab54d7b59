# mypy: ignore-errors
"""FP8 with fp32 scales per 128 along K: A (M, K) 1 x 128, B (N, K) 128 x 128 or 1 x 128.

The kernel of ``product``, which loads scales beside the tiles; 128 x 128 scales of B are brought by
its second warp. Partial sums are scaled as they are added (``mainloop``).
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute, range_constexpr

from ..common.copies import Copies
from ..common.persistent import first
from ..common.promotion import promote_l2
from ..common.tensor_specs import any_matrix, any_tensor
from . import ptx
from .config import BLOCK_K, Config
from .mainloop import Mainloop
from .product import Product, compile_product

__all__ = ["Gemm", "compile_config"]


class Gemm(Product):
    """The kernel of a :class:`Config` and the host code that launches it."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.fetches = config.b_block[0] > 1

    def setup(self):
        """What needs a compiler that runs."""
        config = self.config
        (rows, columns), stages = config.tile, config.stages
        down, across = config.cluster
        self.copies = [
            Copies(cutlass.Uint8, (rows, BLOCK_K), stages, rows=config.loaded_rows, shares=across),
            Copies(cutlass.Uint8, (columns, BLOCK_K), stages, shares=down),
            Copies(Float32, (1, rows), stages, swizzled=False),
        ]
        if not self.fetches:
            self.copies.append(Copies(Float32, (1, columns), stages, swizzled=False))
        self.mainloop = Mainloop(config)

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, d, bias, alpha, multiprocessors, stream):
        """Launch. ``a`` (M, K) and ``b`` (N, K) as bytes; ``a_scale`` (K / 128, M padded to 4);
        ``b_scale`` (N / 128, K / 128), or as that of A; ``d`` (M, N); ``bias`` (N,) and
        ``alpha``, or None.
        """
        self.setup()
        loaded = zip(self.copies, (a, b, a_scale, b_scale), strict=False)
        loads = [each.describe(tensor) for each, tensor in loaded]
        loads[:2] = [(promote_l2(atom), view) for atom, view in loads[:2]]
        blocks = cute.ceil_div(a.shape[1], BLOCK_K)
        self.launch(loads, b_scale, (d, bias, alpha), blocks, multiprocessors, stream)

    def positions(self, row, column, block) -> list:
        k = block * BLOCK_K
        return [(row, k), (column, k), (block, row), (block, column)][: len(self.copies)]

    def allocate(self, memory) -> list:
        if not self.fetches:
            return []
        size = self.config.stages * self.config.scale_bytes[1]
        return [memory.allocate_array(cutlass.Uint8, size, byte_alignment=128).toint()]

    @cute.jit
    def fetch(self, source, shared, full, empty, place):
        """Bring 128 x 128 scales of B to the stages.

        A lane has those of every 32nd K block, read long before a stage is free for them.
        """
        config, (clusters, rank, begin, end) = self.config, place
        lane = cute.arch.lane_idx()
        start, step = first(config.cluster_size)
        stage, phase = Int32(0), Int32(1)
        values = cute.make_rmem_tensor((config.b_scales,), Float32)
        for index in range(start, clusters[0] * clusters[1], step):
            _, column = self.raster.tile(index, clusters, rank)
            for block in range(begin, end, 32):
                for i in range_constexpr(config.b_scales):
                    values[i] = Float32(0)
                    where = (column + i * config.segment) // 128
                    if where < source.shape[0] and block + lane < end:
                        values[i] = source[where, block + lane]
                for i in range(cutlass.min(end - block, Int32(32))):
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    if lane == i:
                        target = shared[3] + stage * config.scale_bytes[1]
                        for j in range_constexpr(config.b_scales):
                            ptx.store_scale(target + 4 * j, values[j])
                        ptx.arrive(self.ring.filled(full, stage, phase).toint())
                    stage, phase = self.advance(stage, phase)

    @cute.jit
    def store(self, sums, out, atom, view, output, group, thread, row, column):
        own = ptx.pin(thread)  # computed before, its addresses would take the mainloop's registers
        Product.store(self, sums, out, atom, view, output, group, own, row, column)


def compile_config(config: Config):
    """The host function of a kernel, which takes tensors of any shape."""

    def scales():
        return any_tensor(Float32, 2, 16, True)

    return compile_product(
        Gemm(config),
        any_tensor(cutlass.Uint8, 2, 16, True),
        scales(),
        any_tensor(cutlass.Uint8, 2, 16, True),
        scales() if config.b_block[0] == 1 else any_matrix(Float32, 4),
    )
