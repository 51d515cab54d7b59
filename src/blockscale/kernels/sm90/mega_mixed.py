# mypy: ignore-errors
"""A mega MoE on Hopper by matrices of four bits, MXFP4 or NVFP4: as ``mega_kernel``, but rows are
bf16 in the rings, in the order that ``mixed_mainloop`` wants, and matrices become bf16 in
registers, where they are what a wgmma takes rows of: accumulators are those of the results
transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute, range_constexpr, select_

from ..common.copies import Copies
from ..common.ptx import load_global, store_global
from ..common.tensor_specs import any_tensor
from ..common.tile_ring import NONE
from ..mega.buffers import MULTIPLE, TILE_ROWS
from . import ptx
from .config import BLOCK_K
from .dequant import place
from .mega_config import COLUMNS, FIRST_CONSUMER, MixedMegaConfig
from .mega_kernel import MegaMoe, mega_host_function
from .mega_mixed_epilogue import MegaMixedEpilogue, widened_e4m3
from .mega_roles import Boxes, tile_of
from .mixed_mainloop import Mainloop

__all__ = ["MixedMegaMoe", "host_function"]

_PANEL = 64  # columns of bf16 in 128 bytes
_OCTET = 8  # columns that a lane widens together, four times


class MixedMegaMoe(MegaMoe):
    """The kernel of a :class:`MixedMegaConfig`. A matrix comes with words of four scales (experts
    * words along K, rows), and perhaps an alpha for each expert, or None."""

    fetches = False

    def boxes_of(self, config: MixedMegaConfig) -> tuple[Boxes, ...]:
        stages, rows, words = config.product.stages, config.unit_rows, config.words
        data = Copies(cutlass.BFloat16, (rows, _PANEL), 2 * stages)
        matrix = Copies(cutlass.Uint8, (MULTIPLE, BLOCK_K // 2), 2 * stages)
        scales = Copies(Float32, (1, rows), stages, swizzled=False)
        matrix_scales = Copies(Int32, (words, MULTIPLE), 2 * stages, swizzled=False)
        k_blocks, heights = config.k_blocks, (2 * config.sizes.intermediate, config.sizes.hidden)

        def scale(tile, k_block, product):
            block = tile.a_row // TILE_ROWS * k_blocks[product]
            return [(block + k_block, tile.a_row % TILE_ROWS)]

        def matrix_scale(tile, k_block, product):
            first = (tile.group * k_blocks[product] + k_block) * words
            return [(first, row - tile.group * heights[product]) for row in tile.b_rows]

        return (
            Boxes(
                data,
                lambda tile, k_block, product: [
                    (tile.a_row, k_block * BLOCK_K + column) for column in (0, _PANEL)
                ],
            ),
            Boxes(
                matrix,
                lambda tile, k_block, product: [
                    (row, k_block * (BLOCK_K // 2)) for row in tile.b_rows
                ],
            ),
            Boxes(scales, scale),
            Boxes(matrix_scales, matrix_scale),
        )

    def loaded(self, ring: tuple, matrices: tuple) -> tuple:
        return ring[0], matrices[0], ring[1], matrices[1]

    def b_scales(self, up: tuple, down: tuple):
        return None

    def alphas(self, up: tuple, down: tuple):
        return None if up[2] is None else (up[2], down[2])

    @property
    def releases(self) -> int:
        """By each thread."""
        return 128 * self.config.consumers

    @staticmethod
    @cute.jit
    def copy_rows(base, rows, width, target: Callable[[int, Any], Any]):
        """As ``ranks.rows.copy_rows``, of E4M3 to bf16. A lane has an octet of each 32 of 128
        columns, which are 64 bytes together: the order of ``permute_activations``."""
        for item in range(cute.arch.lane_idx(), width // (4 * _OCTET), 32):
            first = item // 4 * BLOCK_K + item % 4 * _OCTET
            starts = [base + Int64(row) * width for row in rows]
            places = [4 * _OCTET * part + at for part in range(4) for at in (0, 4)]
            held = [[load_global(start + first + at, 4) for at in places] for start in starts]
            for i in range_constexpr(len(rows)):
                pairs = [pair for word in held[i] for pair in widened_e4m3(word)]
                there = target(i, starts[i]) + item * 64
                for j in range_constexpr(4):
                    store_global(there + j * 16, pairs[j::4], 16)

    @cute.jit
    def multiply(self, peers, pipeline, ring, staging, addresses, fetched, alphas):
        config = self.config
        thread = cute.arch.thread_idx()[0] - FIRST_CONSUMER
        warpgroup = cute.arch.make_warp_uniform(thread // 128)
        mainloop = MegaMixedMainloop(config, pipeline, warpgroup, ptx.pin(thread % 128), addresses)
        epilogue = MegaMixedEpilogue(config, peers, staging, alphas)
        acc = mainloop.accumulators()
        stage, phase, turn = Int32(0), Int32(0), Int32(0)
        words = ring.read(turn)
        while words[0] != NONE:
            tile = tile_of(config, words)
            acc.fill(0.0)
            stage, phase = mainloop(acc, tile, stage, phase)
            epilogue(acc, tile)
            turn = turn + 1
            words = ring.read(turn)


class MegaMixedMainloop(Mainloop):
    """That of ``mixed_mainloop`` by 256 rows of a matrix, each warpgroup's 64. ``addresses``: of
    rows, the matrix's, and scales of both.

    In the second product a thread has two of the matrix's rows that are eight apart; in the first
    one those of the same column of gates and of up, which are halves of the tile.
    """

    def __init__(self, config: MixedMegaConfig, pipeline, warpgroup, thread, addresses: list):
        a, b, a_scale, b_scale = addresses
        super().__init__(config.product, pipeline, Int32(0), thread, a, a_scale, b, b_scale)
        self.words, self.warpgroup, self.thread = config.words, warpgroup, thread
        self.starts = b, b_scale

    def __call__(self, acc, tile, stage, phase):
        """Add products of a tile to ``acc``. The next stage, and its phase."""
        self.find_rows(tile.second == 1)
        return Mainloop.__call__(self, acc, tile.k_blocks, stage, phase)

    def find_rows(self, second) -> None:
        """Where the thread's rows are, and their scales."""
        warp, row, part = self.thread // 32, self.thread % 32 // 4, self.thread % 4
        gate = self.warpgroup * 32 + warp * 8 + row
        own = Int32(select_(second, self.warpgroup * 64 + warp * 16 + row, gate))
        (b, b_scale), box = self.starts, self.words * (MULTIPLE * 4)  # bytes of scales
        self.own = ptx.pin(b + place(own, part, BLOCK_K // 2))
        within = part // 2 * (MULTIPLE * 4) + part % 2 * 2 if self.words == 2 else part
        scales = own // MULTIPLE * box + own % MULTIPLE * 4
        self.own_scale = ptx.pin(b_scale + scales + within)
        apart = Int32(select_(second, Int32(8), Int32(MULTIPLE)))
        self.apart = ptx.pin(apart * (BLOCK_K // 2))
        self.scales_apart = ptx.pin(Int32(select_(second, Int32(8 * 4), Int32(box))))

    def load(self, stage, half: int) -> list:
        first = self.own + stage * (COLUMNS * BLOCK_K // 2)
        count = 2 * self.rows.widener.words
        return [
            word
            for address in (first, first + self.apart)
            for word in ptx.ld_shared(address, 8 * half, count, Int32)
        ]

    def read_scales(self, stage, index: int) -> list:
        first = self.own_scale + stage * (COLUMNS * 4 * self.words)
        nbytes = self.rows.scale_bytes
        addresses = first, first + self.scales_apart
        return self.rows.factors(*(ptx.ld_shared_bytes(each, 0, nbytes) for each in addresses))


def host_function(config: MixedMegaConfig):
    """The host function of a kernel, which takes tensors of any shape."""
    matrices = [
        (
            any_tensor(cutlass.Uint8, 2, 16, True),
            any_tensor(Int32, 2, 16, True),
            any_tensor(Float32, alpha[0], 4) if alpha else None,
        )
        for alpha in config.alphas
    ]
    return mega_host_function(MixedMegaMoe(config), cutlass.BFloat16, matrices)
