# mypy: ignore-errors
"""A mixture of experts over ranks by one persistent kernel on Blackwell: tokens travel, are
multiplied twice, and their results come back and are added up.

A CTA has the warps of a product (four epilogue warps, MMA, loads, and one that finds tiles), and
some that sort and send this rank's tokens and bring rows of experts together. All wait for each
other by counters in memory that ranks share. Every tile waits for what comes earlier in one order
that all CTAs know, so it does not matter how many of them there are; but all must run at once.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ..common.copies import TmaTiles
from ..common.factor import any_added
from ..common.persistent import cluster_sync
from ..common.promotion import promote_l2
from ..common.tensor_specs import HostFunction, any_tensor
from ..common.tile_ring import TileRing
from ..mega.buffers import Buffers
from ..mega.combine import Finish
from ..mega.dispatch import Dispatch
from ..mega.gather import Gather
from ..mega.order import Finder, Walk
from ..mega.peers import Peers, any_arguments
from ..mega.rings import Rings
from . import ptx
from .config import EPILOGUE_WARPS, TMEM_COLUMNS
from .grouped_scheduler import TilePipeline
from .kernel import Gemm
from .mega_config import STAGING_BYTES, MegaConfig
from .mega_epilogue import MegaEpilogue, ReturnEpilogue
from .mega_tiles import MegaLoader, MegaTiles
from .quantizing import QuantizingEpilogue
from .roles import CtaCoord, Loader, Mma, Pipeline

__all__ = ["MegaMoe", "host_function"]

_SORT_BARRIER = 2  # the epilogue has 1


class MegaMoe:
    """The kernel of a :class:`MegaConfig` and the host code that launches it."""

    def __init__(self, config: MegaConfig):
        self.config, self.buffers = config, Buffers(config.sizes)
        self.up, self.down = Gemm(config.up), Gemm(config.down)

    @cute.jit
    def __call__(
        self,
        buffer,
        peers,
        rank,
        ids,
        weights,
        out,
        up,
        down,
        rings,
        up_alpha,
        down_alpha,
        global_scale,
        limit,
        ctas,
        stream,
    ):
        """Launch the kernel.

        ``buffer`` (bytes,) is this rank's; ``peers`` (ranks,) the addresses of all; ``ids`` and
        ``weights`` (tokens, topk); ``out`` (tokens, H). ``up`` and ``down`` are data and scales of
        matrices, as ``Gemm`` takes ``b`` of groups; ``rings`` data and scales of both, which are
        parts of the buffer, and the second one's scales as bytes. ``up_alpha`` and
        ``down_alpha``: of both products, ``global_scale``: of what the second one reads; or None.
        ``limit``: nanoseconds; ``ctas``: a multiple of the cluster's, that run at once.
        """
        self.up.setup()
        self.down.setup()
        (up_ring, up_scale), (down_ring, down_scale), scale_bytes = rings
        operands = (
            (self.up, (up_ring, up[0], up_scale, up[1])),
            (self.down, (down_ring, down[0], down_scale, down[1])),
        )
        atoms = []
        for gemm, tensors in operands:
            op = cpasync.CopyBulkTensorTileG2SOp()
            made = [each.describe(x, op)[0] for each, x in zip(gemm.copies, tensors, strict=True)]
            atoms.append([promote_l2(atom) for atom in made[:2]] + made[2:])
        quantized = down_ring, scale_bytes, global_scale
        store = self.up.describe_store(quantized)
        given = buffer, peers, rank, ids, weights, out, limit
        self.kernel(atoms, *store, quantized, (up_alpha, down_alpha), given).launch(
            grid=(ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            cluster=(self.config.ctas, 1, 1),
            min_blocks_per_mp=1,
            cooperative=True,  # all CTAs run at once, or none
            stream=stream,
        )

    @cute.kernel
    def kernel(self, atoms, store_atom, store_view, quantized, alphas, given):
        config, up = self.config, self.config.up
        buffer, table, this_rank, ids, weights, out, limit = given
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = Int32(0)
        if const_expr(config.ctas > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        cta = CtaCoord(up, rank)
        # before threads meet: what it reads of the state is written when all have finished
        peers = Peers.of_launch(self.buffers, buffer, table, this_rank, limit)

        memory = cutlass.memory.SmemAllocator()
        tiles = [each.allocate(memory) for each in self.up.copies[:2]]
        stored = self.up.out.allocate(memory)
        tiles += [each.allocate(memory) for each in self.up.copies[2:]]
        shared = [each.iterator.toint() for each in tiles]
        staging = memory.allocate_array(cutlass.Int32, STAGING_BYTES // 4, byte_alignment=128)
        count = 2 * up.stages + 2 + up.acc_stages
        barriers = memory.allocate_array(cutlass.Int64, count)
        tmem = memory.allocate_array(cutlass.Int32, 1)
        words = memory.allocate_array(cutlass.Int32, config.sizes.sort_words)
        reciprocals = None
        if const_expr(up.table_bytes):
            reciprocals = memory.allocate_array(cutlass.Uint32, up.table_bytes // 4).toint()
        full, empty = barriers.toint(), (barriers + up.stages).toint()
        acc_full = (barriers + 2 * up.stages).toint()
        acc_empty = acc_full + 16
        ring = TileRing.allocate(memory, 2)  # the epilogue may be a tile behind the loader

        if warp == EPILOGUE_WARPS:
            with cute.arch.elect_one():
                counts = [1] * up.stages + [up.empty_arrivals] * up.stages + [1, 1]
                counts += [EPILOGUE_WARPS * up.ctas] * up.acc_stages
                for i in range_constexpr(count):
                    cute.arch.mbarrier_init(barriers + i, counts[i])
                ring.init_barriers(EPILOGUE_WARPS + 1 + Int32(rank % up.ctas == 0))
            cute.arch.mbarrier_init_fence()
            ptx.tcgen05_alloc(tmem.toint(), TMEM_COLUMNS, up.ctas)
        if warp == EPILOGUE_WARPS + 1:
            for atom in [*atoms[0], *atoms[1]]:
                cpasync.prefetch_descriptor(atom)
        ptx.fence_before_thread_sync()
        if const_expr(config.ctas > 1):
            cluster_sync(config.ctas)
        cute.arch.sync_threads()
        ptx.fence_after_thread_sync()
        tmem = tmem.load()

        places = MegaTiles(config, rank)
        pipelines = [
            Pipeline(
                each,
                cta,
                TilePipeline(ring),
                places,
                extent=(Int32(config.sizes.ring_rows), Int32(columns)),
                shared=shared,
                full=full,
                empty=empty,
                acc_full=acc_full,
                acc_empty=acc_empty,
                tmem=tmem,
            )
            for each, columns in (
                (config.up, config.sizes.intermediate),
                (config.down, config.sizes.hidden),
            )
        ]
        walk = Walk(peers, config.unit_rows)
        first = EPILOGUE_WARPS + 3
        dispatch = Dispatch(
            peers,
            ids,
            config.id_bytes,
            words.toint(),
            cute.arch.thread_idx()[0] - 32 * first,
            32 * config.dispatch_warps,
            _SORT_BARRIER,
        )
        if warp < EPILOGUE_WARPS:
            to_ring = TmaTiles(self.up.out, store_atom, store_view, stored)
            output = quantized, None, alphas[0]
            MegaEpilogue(
                config,
                peers,
                QuantizingEpilogue(pipelines[0], to_ring, output, reciprocals),
                ReturnEpilogue(pipelines[1], staging.toint(), alphas[1], peers),
            )()
            Finish(
                peers,
                dispatch,
                weights,
                out,
                config.out_dtype,
                peers.cta * EPILOGUE_WARPS + warp,
                peers.ctas * EPILOGUE_WARPS,
                True,
            )()
        if warp == EPILOGUE_WARPS:
            with cute.arch.elect_one():
                if rank % up.ctas == 0:
                    Mma(pipelines[0])()
        if warp == EPILOGUE_WARPS + 1:
            with cute.arch.elect_one():
                loaders = [
                    Loader(pipeline, [ptx.tensor_map_address(atom) for atom in some])
                    for pipeline, some in zip(pipelines, atoms, strict=True)
                ]
                writers, readers = (count * config.ctas for count in config.across)
                rings = Rings(peers, config.unit_rows, readers, writers * EPILOGUE_WARPS)
                MegaLoader(rings, *loaders)()
        if warp == EPILOGUE_WARPS + 2:
            cluster = peers.cta // config.ctas, peers.ctas // config.ctas
            order = config.across, config.k_blocks, *cluster
            Finder(walk, ring, *order, dynamic=config.ctas == 1)()
        if warp >= first:
            dispatch.sort()
            if warp < first + config.send_warps:
                if const_expr(config.sizes.ranks > 1):
                    number = peers.cta * config.send_warps + warp - first
                    dispatch.send(number, peers.ctas * config.send_warps)
            else:
                number = peers.cta * config.gather_warps + warp - first - config.send_warps
                tiles_of_unit = config.across[0] * config.ctas
                warps = peers.ctas * config.gather_warps
                Gather(walk, tiles_of_unit, _scale_place, number, warps)()
        ptx.fence_before_thread_sync()
        if const_expr(config.ctas > 1):  # no CTA exits while another one reads its memory
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if warp == EPILOGUE_WARPS:
            ptx.fence_after_thread_sync()
            ptx.tcgen05_dealloc(tmem, TMEM_COLUMNS, up.ctas)


def _scale_place(row):
    """In a tile of scales in layout "tcgen05", the word of a row."""
    return row % 32 * 4 + row // 32


def _any_operand(alignment: int) -> tuple:
    """Data and scales of rows or matrices."""
    return (
        any_tensor(cutlass.Uint8, 2, alignment, True),
        any_tensor(cutlass.Int64, 2, 16, True),
    )


def host_function(config: MegaConfig):
    """The host function of a kernel, which takes tensors of any shape."""
    rings, matrices = (
        [_any_operand(each.alignments[i]) for each in (config.up, config.down)] for i in range(2)
    )
    alphas = (any_added(each)[1] for each in (config.up, config.down))
    scale = any_tensor(Float32, 0, 4) if config.up.table_bytes else None
    return HostFunction(
        config.arch,
        MegaMoe(config),
        *any_arguments(config),
        *matrices,
        (*rings, any_tensor(cutlass.Uint8, 1, 16)),
        *alphas,
        scale,
        Int64(0),
        Int32(1),
    )
