# mypy: ignore-errors
"""Block-scaled A (M, K) times B (N, K) on Blackwell's tensor cores, accumulated in Tensor Memory.

A CTA has four epilogue warps, an MMA warp, whose first thread issues the MMAs, and a load warp,
whose first thread loads A, B and their scales by TMA. Scales are stored as the tiles that the
tensor cores read: they go from shared to Tensor Memory and never into a register. There are two
accumulators, so that a tile is stored while the next one is multiplied. A thread of one more warp
is the scheduler; clusters are persistent, they stay until no tile is left.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ..common.copies import Copies, TmaTiles
from ..common.factor import any_added
from ..common.numeric import NUMERIC
from ..common.persistent import cluster_sync
from ..common.promotion import promote_l2
from ..common.schedule import Raster
from ..common.tensor_specs import HostFunction, any_source, any_tensor
from ..common.tile_ring import TileRing
from . import ptx
from .clc_scheduler import ClcPipeline, ClcScheduler
from .config import CLC_RESPONSE_BYTES, CLC_STAGES, EPILOGUE_WARPS, ROW_BYTES, TMEM_COLUMNS, Config
from .epilogue import Epilogue
from .grouped_scheduler import GroupedTiles, GroupFinder, KGroupedTiles, TilePipeline, most_clusters
from .quantizing import QuantizingEpilogue
from .quantizing_config import STORE_COLUMNS
from .roles import CtaCoord, Loader, Mma, Pipeline
from .tiles import DenseTiles

__all__ = ["Gemm", "host_function"]


class _Unpacked(Copies):
    """Tiles of 4-bit elements, two a byte in global memory, which TMA unpacks to a byte each: the
    first eight of each 16 bytes hold sixteen elements."""

    def describe(self, tensor, op):
        rows, columns = self.box
        layout = cute.make_layout((rows, columns), stride=(columns, 1))
        layout = cute.make_composed_layout(self.swizzle, 0, layout)
        elements = cute.recast_tensor(tensor, cutlass.Float4E2M1FN)
        made = cpasync.make_tiled_tma_atom(op, elements, layout, self.box, internal_type=self.kind)
        return made[0], made[1]


class Gemm:
    """The kernel of a :class:`Config` and the host code that launches it."""

    def __init__(self, config: Config):
        self.config = config
        self.raster = Raster(config.tile, config.cluster, config.group)

    def setup(self):
        """Describe the tiles, which needs a compiler that runs."""
        config = self.config
        words, stages = config.scale_words, config.stages
        halves = 1, config.b_halves
        self.copies = [
            *(self.operand(i) for i in range(2)),
            *(
                Copies(cutlass.Int64, (rows // half, words), stages * half, swizzled=False)
                for rows, half in zip(config.scale_rows, halves, strict=True)
            ),
        ]
        kind = NUMERIC.get(config.out_dtype, cutlass.Uint8)
        box = 32, config.store_row_bytes * 8 // kind.width
        self.out = Copies(kind, box, EPILOGUE_WARPS * config.epilogue_stages)

    def operand(self, i: int) -> Copies:
        """The tiles of A or of B: rows of it, or panels with a row for each element along K."""
        config = self.config
        kind = _Unpacked if config.unpacked[i] else Copies
        rows, shares = (config.tile[0], config.b_rows)[i], config.multicast_ctas[i]
        height = shares * config.box_rows[i]
        count = rows // height
        if config.majors[i] == "mn":
            height, count = config.kind.block_k, rows // ROW_BYTES
        return kind(cutlass.Uint8, (height, ROW_BYTES), config.stages * count, shares=shares)

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, d, bias, alpha, offsets, supergroup, stream):
        """Launch the kernel.

        ``a`` (M, K) and ``b`` (N, K) are bytes as stored, transposed where K is not contiguous;
        ``a_scale`` and ``b_scale`` have tiles down and along K, of 64 words of 8 bytes each; ``d``
        is (M, N), or data, scales and a global scale or None; ``bias`` is (N,) or None, as
        ``alpha`` may be. Where rows are grouped, ``b`` has the matrices of all groups, one below
        the other; where columns are, ``d`` has their products. Then ``offsets`` (groups,) int32,
        and ``supergroup`` as of ``RowGroups``; else None.
        """
        self.setup()
        config = self.config
        op = cpasync.CopyBulkTensorTileG2SOp()
        pairs = zip(self.copies, (a, b, a_scale, b_scale), strict=True)
        atoms = [each.describe(tensor, op)[0] for each, tensor in pairs]
        atoms[:2] = [promote_l2(atom) for atom in atoms[:2]]
        if const_expr(config.is_grouped):
            clusters = most_clusters(config, self.extent(d), offsets.shape[0])
        else:
            down, across = self.raster.clusters(*self.extent(d))
            clusters = down * across
        k_blocks = Int32(cute.ceil_div(a_scale.shape[1], config.scale_words))
        output, groups = (d, bias, alpha), (offsets, supergroup)
        self.kernel(atoms, *self.describe_store(d), output, k_blocks, groups).launch(
            grid=(clusters * config.cluster_size, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.cluster_size, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def tiles(self, extent: tuple, rank, k_blocks, groups) -> Any:
        """Tells where the tiles of a CTA are."""
        config = self.config
        if not config.is_grouped:
            return DenseTiles(self.raster, self.raster.clusters(*extent), rank, k_blocks)
        given = {
            "shape": config.tile,
            "cluster": config.cluster,
            "offsets": groups[0],
            "supergroup": groups[1],
            "extent": tuple(map(Int32, extent)),
            "rank": rank,
            "k_blocks": k_blocks,
            "block_k": config.kind.block_k,
        }
        if config.grouping == "k":
            return KGroupedTiles(**given, skips_empty=config.accumulate)
        more = {"masked": config.grouping == "masked", "b_halves": config.b_halves}
        return GroupedTiles(**given, **more)

    def extent(self, d) -> tuple:
        """The rows and columns of the output."""
        if self.config.quantizing is None:
            return d.shape
        return d[0].shape[0], d[0].shape[1] * (STORE_COLUMNS // self.config.store_row_bytes)

    def describe_store(self, d) -> tuple:
        """The atom and the tensor of coordinates of TMA stores, if there are any."""
        if not self.config.tma_store:
            return None, None
        if self.config.quantizing is not None:
            d = d[0]
        op = cpasync.CopyBulkTensorTileS2GOp()
        if self.config.reduces:
            op = cpasync.CopyReduceBulkTensorTileS2GOp()
        return self.out.describe(d, op)

    @cute.kernel
    def kernel(self, atoms, store_atom, store_view, output, k_blocks, groups):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = Int32(0)
        if const_expr(config.cluster_size > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        cta = CtaCoord(config, rank)

        memory = cutlass.memory.SmemAllocator()
        tiles = [each.allocate(memory) for each in self.copies[:2]]
        out = self.out.allocate(memory) if config.tma_store else None
        tiles += [each.allocate(memory) for each in self.copies[2:]]
        shared = [each.iterator.toint() for each in tiles]
        responses = memory.allocate_array(
            cutlass.Int64, CLC_STAGES * CLC_RESPONSE_BYTES // 8, byte_alignment=CLC_RESPONSE_BYTES
        )
        count = 2 * config.stages + 2 + config.acc_stages + 2 * CLC_STAGES
        barriers = memory.allocate_array(cutlass.Int64, count)
        tmem = memory.allocate_array(cutlass.Int32, 1)
        table = None
        if const_expr(config.table_bytes):
            table = memory.allocate_array(cutlass.Uint32, config.table_bytes // 4).toint()
        full, empty = barriers.toint(), (barriers + config.stages).toint()
        acc_full = (barriers + 2 * config.stages).toint()
        acc_empty = acc_full + 16
        clc_full = acc_empty + config.acc_stages * 8
        clc = ClcPipeline(config, responses.toint(), clc_full, clc_full + CLC_STAGES * 8)
        ring = TileRing.allocate(memory) if config.is_grouped else None

        if warp == EPILOGUE_WARPS:
            with cute.arch.elect_one():
                counts = [1] * config.stages + [config.empty_arrivals] * config.stages + [1, 1]
                counts += [EPILOGUE_WARPS * config.ctas] * config.acc_stages
                counts += [1] * CLC_STAGES + [config.clc_arrivals] * CLC_STAGES
                for i in range_constexpr(count):
                    cute.arch.mbarrier_init(barriers + i, counts[i])
                if const_expr(config.is_grouped):  # the MMA warp reads tiles of the even CTA
                    ring.init_barriers(EPILOGUE_WARPS + 1 + Int32(rank % config.ctas == 0))
            cute.arch.mbarrier_init_fence()
            ptx.tcgen05_alloc(tmem.toint(), TMEM_COLUMNS, config.ctas)
        if warp == EPILOGUE_WARPS + 1:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        ptx.fence_before_thread_sync()
        if const_expr(config.cluster_size > 1):
            cluster_sync(config.cluster_size)
        cute.arch.sync_threads()
        ptx.fence_after_thread_sync()
        tmem = tmem.load()

        extent = self.extent(output[0])
        tiles = self.tiles(extent, rank, k_blocks, groups)
        pipeline = Pipeline(
            config,
            cta,
            TilePipeline(ring) if config.is_grouped else clc,
            tiles,
            extent=extent,
            shared=shared,
            full=full,
            empty=empty,
            acc_full=acc_full,
            acc_empty=acc_empty,
            tmem=tmem,
        )
        epilogue = pipeline, TmaTiles(self.out, store_atom, store_view, out), output
        if warp < EPILOGUE_WARPS:
            if const_expr(config.quantizing is None):
                Epilogue(*epilogue)()
            else:
                QuantizingEpilogue(*epilogue, table)()
        if warp == EPILOGUE_WARPS:
            with cute.arch.elect_one():  # outside, so that ptxas sees that there is one thread
                if rank % config.ctas == 0:
                    Mma(pipeline)()
        if warp == EPILOGUE_WARPS + 1:
            with cute.arch.elect_one():
                Loader(pipeline, [ptx.tensor_map_address(atom) for atom in atoms])()
        if warp == EPILOGUE_WARPS + 2 and rank == 0:
            with cute.arch.elect_one():
                ClcScheduler(clc)()
        if const_expr(config.is_grouped):  # noqa: SIM102 - one is known when compiling
            if warp == EPILOGUE_WARPS + 3:
                GroupFinder(clc, tiles, ring)()
        ptx.fence_before_thread_sync()
        if const_expr(config.cluster_size > 1):  # no CTA exits while another one reads its memory
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if warp == EPILOGUE_WARPS:
            ptx.fence_after_thread_sync()
            ptx.tcgen05_dealloc(tmem, TMEM_COLUMNS, config.ctas)


def _output(config: Config):
    """The spec of outputs of any shape."""
    if config.quantizing is None:
        return any_source(config.out_dtype, config.tma_store)
    scale = any_tensor(Float32, 0, 4) if config.table_bytes else None
    return any_tensor(cutlass.Uint8, 2, 16, True), any_tensor(cutlass.Uint8, 1, 16), scale


def host_function(config: Config):
    """The host function of a kernel, which takes tensors of any shape."""
    a, b = (any_tensor(cutlass.Uint8, 2, each, True) for each in config.alignments)
    groups = (any_tensor(Int32, 1, 4), Int32(1)) if config.is_grouped else (None, None)
    return HostFunction(
        config.arch,
        Gemm(config),
        a,
        any_tensor(cutlass.Int64, 2, 16, True),
        b,
        any_tensor(cutlass.Int64, 2, 16, True),
        _output(config),
        *any_added(config),
        *groups,
    )
