# mypy: ignore-errors
"""Block-scaled A (M, K) times B (N, K) on Blackwell's tensor cores, sums in Tensor Memory.

A block of threads has four warps that store, one whose first thread starts the instructions, and
one whose first thread loads: A, B, and their scales as the tiles that the tensor cores read, which
go from shared to Tensor Memory and never into a register. There are two sets of sums, so that a
tile is stored while the next one is multiplied. A thread of one more warp asks for tiles: clusters
stay until none is left.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ..common.copies import Copies
from ..common.factor import any_added
from ..common.numeric import NUMERIC
from ..common.persistent import cluster_sync
from ..common.promotion import promote_l2
from ..common.schedule import Raster
from ..common.tensor_specs import any_source, any_tensor, compile_for
from . import ptx
from .config import ANSWER, COLUMNS, ROW, TURNS, WARPS, Config
from .epilogue import Epilogue
from .quantizing import QuantizingEpilogue
from .quantizing_config import BOX_COLUMNS
from .roles import Loader, Multiplier, Pipeline, Place
from .turns import Scheduler, Turns

__all__ = ["Gemm", "compile_config"]


class _Spread(Copies):
    """Tiles of 4-bit elements, two a byte in global memory, which TMA gives a byte each: of each 16
    the first eight bytes have sixteen."""

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
        """What needs a compiler that runs."""
        config = self.config
        tiles, stages = config.scale_words, config.stages
        parts = 1, config.parts_of_columns
        self.copies = [
            *(self.operand(i) for i in range(2)),
            *(
                Copies(cutlass.Int64, (rows // part, tiles), stages * part, swizzled=False)
                for rows, part in zip(config.scale_rows, parts, strict=True)
            ),
        ]
        kind = NUMERIC.get(config.out_dtype, cutlass.Uint8)
        box = 32, config.store_bytes * 8 // kind.width
        self.out = Copies(kind, box, WARPS * config.c_buffers)

    def operand(self, i: int) -> Copies:
        """Tiles of A, of B: rows of it, or panels with a row for each element along K."""
        config = self.config
        kind = _Spread if config.unpacked[i] else Copies
        rows, shares = (config.tile[0], config.b_rows)[i], config.parts[i]
        height = shares * config.box_rows[i]
        count = rows // height
        if config.majors[i] == "mn":
            height, count = config.kind.block_k, rows // ROW
        return kind(cutlass.Uint8, (height, ROW), config.stages * count, shares=shares)

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, d, bias, alpha, stream):
        """Launch. ``a`` (M, K) and ``b`` (N, K): bytes as stored, transposed where K is not
        contiguous; ``a_scale``, ``b_scale``: tiles down and along K, each 64 words of 8 bytes;
        ``d`` (M, N), or data, scales and a global scale or None; ``bias`` (N,) and ``alpha``, or
        None.
        """
        self.setup()
        config = self.config
        op = cpasync.CopyBulkTensorTileG2SOp()
        pairs = zip(self.copies, (a, b, a_scale, b_scale), strict=True)
        atoms = [each.describe(tensor, op)[0] for each, tensor in pairs]
        atoms[:2] = [promote_l2(atom) for atom in atoms[:2]]
        clusters = self.raster.clusters(*self.extent(d))
        blocks = cute.ceil_div(a_scale.shape[1], config.scale_words)
        self.kernel(atoms, *self.describe_store(d), (d, bias, alpha), Int32(blocks)).launch(
            grid=(clusters[0] * clusters[1] * config.blocks, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.blocks, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def extent(self, d) -> tuple:
        """Rows and columns of the output."""
        if self.config.quantizing is None:
            return d.shape
        return d[0].shape[0], d[0].shape[1] * (BOX_COLUMNS // self.config.store_bytes)

    def describe_store(self, d) -> tuple:
        """Atom and tensor of coordinates, if there are any."""
        if not self.config.tma_store:
            return None, None
        if self.config.quantizing is not None:
            d = d[0]
        op = cpasync.CopyBulkTensorTileS2GOp()
        if self.config.reduces:
            op = cpasync.CopyReduceBulkTensorTileS2GOp()
        return self.out.describe(d, op)

    @cute.kernel
    def kernel(self, atoms, store_atom, store_view, output, blocks):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = Int32(0)
        if const_expr(config.blocks > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        place = Place(config, rank)

        memory = cutlass.memory.SmemAllocator()
        tiles = [each.allocate(memory) for each in self.copies[:2]]
        out = self.out.allocate(memory) if config.tma_store else None
        tiles += [each.allocate(memory) for each in self.copies[2:]]
        shared = [each.iterator.toint() for each in tiles]
        answers = memory.allocate_array(cutlass.Int64, TURNS * ANSWER // 8, byte_alignment=ANSWER)
        count = 2 * config.stages + 2 + config.sums + 2 * TURNS
        barriers = memory.allocate_array(cutlass.Int64, count)
        where = memory.allocate_array(cutlass.Int32, 1)
        table = None
        if const_expr(config.table_bytes):
            table = memory.allocate_array(cutlass.Uint32, config.table_bytes // 4).toint()
        full, empty = barriers.toint(), (barriers + config.stages).toint()
        ready = (barriers + 2 * config.stages).toint()
        freed = ready + 16
        answered = freed + config.sums * 8
        turns = Turns(config, answers.toint(), answered, answered + TURNS * 8)

        if warp == WARPS:
            with cute.arch.elect_one():
                counts = [1] * config.stages + [config.writers] * config.stages + [1, 1]
                counts += [WARPS * config.ctas] * config.sums
                counts += [1] * TURNS + [config.readers] * TURNS
                for i in range_constexpr(count):
                    cute.arch.mbarrier_init(barriers + i, counts[i])
            cute.arch.mbarrier_init_fence()
            ptx.allocate(where.toint(), COLUMNS, config.ctas)
        if warp == WARPS + 1:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        ptx.sums_read()
        if const_expr(config.blocks > 1):
            cluster_sync(config.blocks)
        cute.arch.sync_threads()
        ptx.sums_known()
        start = where.load()

        extent = self.extent(output[0])
        tiles = self.raster.clusters(*extent)
        barriers = full, empty, ready, freed
        pipeline = Pipeline(
            config, self.raster, place, turns, tiles, extent, blocks, shared, *barriers, start
        )
        epilogue = pipeline, self.out, out, store_atom, store_view, output
        if warp < WARPS:
            if const_expr(config.quantizing is None):
                Epilogue(*epilogue)()
            else:
                QuantizingEpilogue(*epilogue, table)()
        if warp == WARPS:
            with cute.arch.elect_one():  # outside, so that ptxas sees that there is one thread
                if rank % config.ctas == 0:
                    Multiplier(pipeline)()
        if warp == WARPS + 1:
            with cute.arch.elect_one():
                Loader(pipeline, [ptx.map_address(atom) for atom in atoms])()
        if warp == WARPS + 2 and rank == 0:
            with cute.arch.elect_one():
                Scheduler(turns)()
        ptx.sums_read()
        if const_expr(config.blocks > 1):  # nobody leaves before all have done with its memory
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if warp == WARPS:
            ptx.sums_known()
            ptx.free(start, COLUMNS, config.ctas)


def _output(config: Config):
    """Of any shape."""
    if config.quantizing is None:
        return any_source(config.out_dtype, config.tma_store)
    scale = any_tensor(Float32, 0, 4) if config.table_bytes else None
    return any_tensor(cutlass.Uint8, 2, 16, True), any_tensor(cutlass.Uint8, 1, 16), scale


def compile_config(config: Config):
    """The host function of a kernel, which takes tensors of any shape."""
    a, b = (any_tensor(cutlass.Uint8, 2, each, True) for each in config.alignments)
    return compile_for(
        config.arch,
        Gemm(config),
        a,
        any_tensor(cutlass.Int64, 2, 16, True),
        b,
        any_tensor(cutlass.Int64, 2, 16, True),
        _output(config),
        *any_added(config),
    )
