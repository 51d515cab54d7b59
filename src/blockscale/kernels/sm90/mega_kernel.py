# mypy: ignore-errors
"""A mixture of experts over ranks by one persistent kernel on Hopper: tokens travel, are multiplied
twice, and their results come back and are added up.

A CTA has a warpgroup of single warps (loads, scales of matrices, and what finds tiles), one that
sorts and sends this rank's tokens and brings rows of experts together, and two that multiply (four
in ``mega_mixed``). All
wait for each other by counters in memory that ranks share. Every tile waits for what comes earlier
in one order that all CTAs know; all must run at once.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ..common import shared
from ..common.copies import Copies, TmaTiles
from ..common.pipeline import Pipeline
from ..common.promotion import promote_l2
from ..common.tensor_specs import HostFunction, any_strided, any_tensor
from ..common.tile_ring import NONE, TileRing
from ..mega.buffers import MULTIPLE, TILE_ROWS, Buffers
from ..mega.combine import Finish
from ..mega.dispatch import Dispatch
from ..mega.gather import Gather
from ..mega.order import Finder, Walk
from ..mega.peers import Peers, any_arguments
from ..mega.rings import Rings
from ..ranks.rows import copy_rows
from . import ptx
from .config import BLOCK_K
from .fp8_gemm import Mainloop
from .kernel import accumulators
from .mega_config import FIRST_CONSUMER, FIRST_DISPATCH, MegaConfig
from .mega_epilogue import MegaEpilogue
from .mega_roles import Boxes, MegaFetcher, MegaLoader, tile_of

__all__ = ["MegaMoe", "host_function", "mega_host_function"]

_SORT_BARRIER = 3


class MegaMoe:
    """The kernel of a :class:`MegaConfig` and the host code that launches it; that of another
    product has other ``boxes``, and overrides :meth:`multiply`."""

    #: A warp fetches scales of matrices, which TMA cannot.
    fetches = True
    #: Brings rows to the first ring.
    copy_rows = staticmethod(copy_rows)

    def __init__(self, config: MegaConfig):
        self.config, self.buffers = config, Buffers(config.sizes)
        self.boxes = self.boxes_of(config)

    def boxes_of(self, config: MegaConfig) -> tuple[Boxes, ...]:
        """What TMA loads for a stage: rows, halves of a matrix's, and scales."""
        stages, words = config.product.stages, config.k_blocks
        half = Copies(cutlass.Uint8, (MULTIPLE, BLOCK_K), 2 * stages)
        scales = Copies(Float32, (1, TILE_ROWS), stages, swizzled=False)
        return (
            Boxes(
                Copies(cutlass.Uint8, (TILE_ROWS, BLOCK_K), stages),
                lambda tile, k_block, product: [(tile.a_row, k_block * BLOCK_K)],
            ),
            Boxes(
                half,
                lambda tile, k_block, product: [(row, k_block * BLOCK_K) for row in tile.b_rows],
            ),
            Boxes(
                scales,
                lambda tile, k_block, product: [(tile.slot * words[product] + k_block, Int32(0))],
            ),
        )

    @cute.jit
    def __call__(
        self, buffer, peers, rank, ids, weights, out, up, down, rings, limit, ctas, stream
    ):
        """Launch the kernel.

        ``buffer`` (bytes,) is this rank's; ``peers`` (ranks,) the addresses of all; ``ids`` and
        ``weights`` (tokens, topk); ``out`` (tokens, H). ``up`` and ``down`` are what
        :meth:`loaded` and :meth:`b_scales` take apart: bytes (experts * rows, K) and scales
        (experts, rows / 128, K / 128); ``rings`` rows and their scales of both, which are parts of
        the buffer. ``limit``: nanoseconds; ``ctas``: that run at once.
        """
        atoms, views = [], []
        for ring, matrices in zip(rings, (up, down), strict=True):
            loaded = self.loaded(ring, matrices)
            made = [each.copies.describe(x) for each, x in zip(self.boxes, loaded, strict=True)]
            atoms.append([promote_l2(made[0][0]), *(atom for atom, _ in made[1:])])
            views.append([view for _, view in made])
        given = buffer, peers, rank, ids, weights, out, limit
        self.kernel(atoms, views, self.b_scales(up, down), self.alphas(up, down), given).launch(
            grid=(ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            min_blocks_per_mp=1,
            cooperative=True,  # all CTAs run at once, or none
            stream=stream,
        )

    def loaded(self, ring: tuple, matrices: tuple) -> tuple:
        """The tensors of :attr:`boxes`."""
        return ring[0], matrices[0], ring[1]

    def b_scales(self, up: tuple, down: tuple):
        """Scales of both matrices that a warp fetches; None where TMA loads them."""
        return up[1], down[1]

    def alphas(self, up: tuple, down: tuple):
        """What accumulators of both products are multiplied by, or None."""
        return None

    @cute.kernel
    def kernel(self, atoms, views, b_scales, alphas, given):
        config, product = self.config, self.config.product
        buffer, table, this_rank, ids, weights, out, limit = given
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # before threads meet: what it reads of the state is written when all have finished
        peers = Peers.of_launch(self.buffers, buffer, table, this_rank, limit)

        memory = cutlass.memory.SmemAllocator()
        tiles = [each.copies.allocate(memory) for each in self.boxes]
        staging, fetched = shared.allocate(memory, config.staging_bytes, 128), None
        if const_expr(self.fetches):
            fetched = shared.allocate(memory, product.stages * product.b_scales_apart, 128)
        copies = [each.copies for each in self.boxes]
        loads = [
            [TmaTiles(*each) for each in zip(copies, *some, tiles, strict=True)]
            for some in zip(atoms, views, strict=True)
        ]
        words = shared.allocate(memory, 4 * config.sizes.sort_words, 16)
        pipeline = Pipeline.allocate(memory, product.stages, 1)
        ring = TileRing.allocate(memory, 1)  # the next tile is taken when one begins, not before
        if warp == 0:
            for atom in [*atoms[0], *atoms[1]]:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in range_constexpr(product.stages):
                    cute.arch.mbarrier_init(pipeline.full + i, 1 + self.fetches)
                    cute.arch.mbarrier_init(pipeline.empty + i, self.releases)
                ring.init_barriers(1 + self.fetches + 4 * config.consumers)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        walk = Walk(peers, config.unit_rows)
        thread = cute.arch.thread_idx()[0]
        count = 32 * (config.send_warps + config.gather_warps)
        sorting = words, thread - FIRST_DISPATCH, count, _SORT_BARRIER
        dispatch = Dispatch(peers, ids, config.id_bytes, *sorting)
        loading, sending, multiplying = config.registers
        if warp < FIRST_DISPATCH // 32:
            cute.arch.setmaxregister_decrease(loading)
            if warp == 0:
                up, down = config.across
                rings = Rings(peers, config.unit_rows, down, up * 4 * config.consumers)
                MegaLoader(config, rings, pipeline, ring, self.boxes, loads)()
            if const_expr(self.fetches):  # noqa: SIM102 - one is known when compiling
                if warp == 1:
                    MegaFetcher(config, pipeline, ring, b_scales, fetched)()
            if warp == 2:
                order = config.across, config.k_blocks, peers.cta, peers.ctas
                Finder(walk, ring, *order, dynamic=True)()
        elif warp < FIRST_CONSUMER // 32:
            cute.arch.setmaxregister_decrease(sending)
            dispatch.sort()
            number = warp - FIRST_DISPATCH // 32
            if number < config.send_warps:
                if config.sizes.ranks > 1:
                    number = peers.cta * config.send_warps + number
                    dispatch.send(number, peers.ctas * config.send_warps)
            else:
                number = peers.cta * config.gather_warps + number - config.send_warps
                warps = peers.ctas * config.gather_warps
                how = _scale_place, number, warps, self.copy_rows
                Gather(walk, config.across[0], *how)()
        else:
            cute.arch.setmaxregister_increase(multiplying)
            addresses = [each.iterator.toint() for each in tiles]
            self.multiply(peers, pipeline, ring, staging, addresses, fetched, alphas)
            number = 4 * config.consumers
            Finish(
                peers,
                dispatch,
                weights,
                out,
                config.out_dtype,
                peers.cta * number + warp - FIRST_CONSUMER // 32,
                peers.ctas * number,
                False,
            )()

    @property
    def releases(self) -> int:
        """How often a stage is said to have been read: once by each warp."""
        return 4 * self.config.consumers

    @cute.jit
    def multiply(self, peers, pipeline, ring, staging, addresses, fetched, alphas):
        """The work of a warpgroup that multiplies, and stores."""
        config = self.config
        thread = cute.arch.thread_idx()[0] - FIRST_CONSUMER
        warpgroup = cute.arch.make_warp_uniform(thread // 128)
        thread = ptx.pin(thread % 128)
        a, b, a_scale = addresses
        place = warpgroup * 64, thread
        mainloop = Mainloop(config.product, pipeline, *place, a, b, a_scale, fetched)
        epilogue = MegaEpilogue(config, peers, staging)
        acc = [accumulators(config.product) for _ in config.product.mma_tiles]
        stage, phase, turn = Int32(0), Int32(0), Int32(0)
        words = ring.read(turn)
        while words[0] != NONE:
            tile = tile_of(config, words)
            # what a wgmma would keep of the last tile takes no registers in the epilogue so
            for each in (*acc, mainloop.partial_acc):
                each.fill(0.0)
            stage, phase = mainloop(acc, tile, tile.k_blocks, stage, phase)
            epilogue(acc, tile)
            turn = turn + 1
            words = ring.read(turn)


def _scale_place(row) -> Any:
    """In a tile of scales, the word of a row."""
    return row


def host_function(config: MegaConfig):
    """The host function of a kernel, which takes tensors of any shape."""
    matrices = [
        (any_tensor(cutlass.Uint8, 2, 16, True), any_strided(Float32, 3, 4)) for _ in range(2)
    ]
    return mega_host_function(MegaMoe(config), cutlass.Uint8, matrices)


def mega_host_function(kernel: MegaMoe, elements, matrices: list):
    """The same of one whose rings have such ``elements``."""
    rings = [
        (any_tensor(elements, 2, 16, True), any_tensor(Float32, 2, 16, True)) for _ in range(2)
    ]
    given = *any_arguments(kernel.config), *matrices, tuple(rings)
    return HostFunction(kernel.config.arch, kernel, *given, Int64(0), Int32(1))
