# mypy: ignore-errors
"""A product of FP8 whose rows ranks have shards of, which come together meanwhile: tiles of this
rank's own rows are first, others wait for their chunks.

It is the kernel of ``fp8_gemm``; two more warps write this rank's shard to all others
(``ranks.gathering``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute, select_

from ..common.copies import TmaTiles
from ..common.factor import any_added
from ..common.pipeline import Pipeline
from ..common.promotion import promote_l2
from ..common.schedule import clusters_of
from ..common.tensor_specs import HostFunction, any_source, any_strided, any_tensor
from ..ranks.gathering import Gathering, Sender
from . import ptx
from .config import BLOCK_K
from .dense_scheduler import DenseScheduler, DenseTiles, Tile
from .fp8_gemm import Fp8Gemm
from .gather_config import GatherConfig
from .kernel import Gemm, Operand

__all__ = ["GatherGemm", "host_function"]

_SEND_WARPS = 2
_SCALE = 2  # which operand has the scales of A


@dataclass(frozen=True)
class Shard:
    """What ranks bring together: a launch's, of whoever loads and sends.

    Attributes:
        atoms, views: of the shard's rows, and of its scales.
        own, own_scale: the shard; ``data`` and ``scale``: of all ranks.
        memory: as of ``Gathering.of_launch``.
    """

    atoms: Any
    views: Any
    own: Any
    own_scale: Any
    data: Any
    scale: Any
    memory: Any
    rank: Any
    limit: Any


@dataclass(frozen=True)
class GatherTile(Tile):
    """``source``: whose rows these are; ``source_row``: the first one, in its shard."""

    source: Any = None
    source_row: Any = None


@dataclass(frozen=True)
class GatherTiles:
    """The tiles of a CTA, this rank's own first, then a chunk of each other rank after the other,
    as they come. ``own``: how many lie below each other in a shard."""

    tiles: DenseTiles
    gathering: Gathering
    shard: Any
    tile_rows: int
    own: Any

    @property
    def count(self):
        return self.tiles.count

    @property
    def rank(self):
        return self.tiles.rank

    def first(self):
        return self.tiles.first()

    def tile(self, index) -> GatherTile:
        g, found = self.gathering, self.tiles.tile(index)
        number, own = found.row // self.tile_rows, self.own
        later = cutlass.max(number - own, Int32(0))
        other = (g.rank + g.ranks - 1 - later % (g.ranks - 1)) % g.ranks
        source = Int32(select_(number < own, g.rank, other))
        within = Int32(select_(number < own, number, later // (g.ranks - 1))) * self.tile_rows
        within = cutlass.min(within, g.rows - self.tile_rows)
        row = source * g.rows + within
        place = row, found.column, found.k_begin, found.k_end
        return GatherTile(*place, a_row=row, b_row=found.column, source=source, source_row=within)


class GatherScheduler(DenseScheduler):
    """Each rank's rows are so many whole tiles."""

    def clusters(self, d, shard):
        rows = Shard(*shard).own.shape[0]
        own, across = clusters_of(self.config.tile, self.config.cluster, rows, d.shape[1])
        return d.shape[0] // rows * own, across

    def tiles(self, d, k_blocks, rank, k_part, shard, ring=None) -> GatherTiles:
        found = replace(super().tiles(d, k_blocks, rank, k_part, shard), last_row=None)
        shard = Shard(*shard)
        given = shard.own, shard.data, shard.scale, shard.rank, shard.limit
        gathering = Gathering.of_launch(shard.memory, *given)
        own = found.clusters[0] // gathering.ranks
        return GatherTiles(found, gathering, shard, self.config.tile[0], own)


@dataclass(frozen=True)
class GatherLoader:
    """Keeps the stages filled, as ``kernel.Loader`` does: of this rank's rows from its shard, of
    others from where they come together. ``own`` loads the shard's rows and scales.

    Where a rank is missing, scales are NaN.
    """

    config: GatherConfig
    pipeline: Pipeline
    schedule: GatherTiles
    operands: tuple[Operand, ...]
    loads: list[TmaTiles]
    own: list[TmaTiles]

    @cute.jit
    def __call__(self, epoch):
        g, tile_rows = self.schedule.gathering, self.config.tile[0]
        start, step = self.schedule.first()
        stage, phase = Int32(0), Int32(1)
        for index in range(start, self.schedule.count, step):
            tile, missing = self.schedule.tile(index), False
            if tile.source != g.rank:
                missing = g.await_rows(epoch, tile.source, tile.source_row, tile_rows)
            for k_block in range(tile.k_begin, tile.k_end):
                self.pipeline.producer_acquire(stage, phase)
                barrier = self.pipeline.producer_barrier(stage, phase)
                if cute.arch.lane_idx() == 0:
                    nbytes = sum(each.copies.moved for each in self.loads)
                    ptx.mbarrier_arrive_expect_tx(barrier.toint(), nbytes)
                if tile.source == g.rank:
                    here = replace(tile, a_row=tile.source_row)
                    loads = self.own[0], self.loads[1], self.own[1]
                    self.fill(loads, here, k_block, k_block, stage, barrier)
                else:
                    scales = Int32(select_(missing, Int32(0), k_block + 1))
                    self.fill(self.loads, tile, k_block, scales, stage, barrier)
                stage, phase = self.pipeline.producer_next(stage, phase)

    def fill(self, loads, tile, k_block, scales, stage, barrier) -> None:
        """Load a K block, whose scales of A are the row ``scales``."""
        for i, (operand, load) in enumerate(zip(self.operands, loads, strict=True)):
            origin = operand.origin(tile, scales if i == _SCALE else k_block)
            load.load(stage, origin, barrier)


@dataclass(frozen=True)
class GatherKernel(Gemm):
    """The kernel of :class:`GatherGemm`."""

    sends = True

    @property
    def scheduler(self):
        return GatherScheduler(self.config)

    def load(self, pipeline, schedule, loads) -> None:
        shard = schedule.shard
        of = [loads[0], loads[_SCALE]]
        own = [
            replace(load, atom=atom, view=view)
            for load, atom, view in zip(of, shard.atoms, shard.views, strict=True)
        ]
        epoch = schedule.gathering.epoch()
        GatherLoader(self.config, pipeline, schedule, self.operands, loads, own)(epoch)
        self.finish(schedule, epoch)

    def send(self, schedule, number) -> None:
        """The work of a warp: ``number`` of those that write to other ranks."""
        shard, ctas = schedule.shard, cute.arch.grid_dim()[0]
        warp = cute.arch.block_idx()[0] * _SEND_WARPS + number
        own = (each.iterator.toint() for each in (shard.own, shard.own_scale))
        epoch = schedule.gathering.epoch()
        Sender(schedule.gathering, *own, warp, ctas * _SEND_WARPS)(epoch)
        self.finish(schedule, epoch)

    def finish(self, schedule, epoch) -> None:
        schedule.gathering.finish(epoch, cute.arch.grid_dim()[0] * (1 + _SEND_WARPS))


class GatherGemm:
    """The kernel of a :class:`GatherConfig` and the host code that launches it."""

    def __init__(self, config: GatherConfig):
        like = Fp8Gemm(config).gemm
        given = like.operands, like.mainloop, like.fetcher, like.fetched_bytes
        self.gemm = GatherKernel(config, *given)

    @cute.jit
    def __call__(
        self, own, own_scale, data, scale, b, b_scale, d, bias, alpha, memory, place, ctas, stream
    ):
        """Launch. ``own`` (rows, K) as bytes, and ``own_scale`` (K / 128, rows) are this rank's;
        ``data`` (ranks * rows, K) and ``scale`` (1 + K / 128, ranks * rows), whose first row is
        NaN, where all come together. ``b`` (N, K), ``b_scale`` (N / 128, K / 128), ``d`` (ranks *
        rows, N), ``bias`` and ``alpha`` as of ``fp8_gemm``. ``memory``: as of
        ``Gathering.of_launch``; ``place``: this rank, and nanoseconds to wait for others; ``ctas``:
        that run at once.
        """
        operands = self.gemm.operands
        whole = zip(operands, (data, b, scale), strict=True)
        loads = [operand.copies.describe(tensor) for operand, tensor in whole]
        mine = zip((operands[0], operands[_SCALE]), (own, own_scale), strict=True)
        shard = [operand.copies.describe(tensor) for operand, tensor in mine]
        for some in (loads, shard):
            some[0] = promote_l2(some[0][0]), some[0][1]
        loads[1] = promote_l2(loads[1][0]), loads[1][1]
        atoms, views = zip(*shard, strict=True)
        given = atoms, views, own, own_scale, data, scale, memory, *place
        k_blocks = own.shape[1] // BLOCK_K
        self.gemm.launch(loads, b_scale, (d, bias, alpha), k_blocks, given, ctas, stream)


def host_function(config: GatherConfig):
    """The host function of a kernel, which takes tensors of any shape."""

    def matrix(kind):
        return any_tensor(kind, 2, 16, True)

    return HostFunction(
        config.arch,
        GatherGemm(config),
        *(matrix(kind) for kind in (cutlass.Uint8, Float32, cutlass.Uint8, Float32, cutlass.Uint8)),
        any_strided(Float32, 2, 4),
        any_source(config.out_dtype, config.tma_store),
        *any_added(config),
        (any_tensor(cutlass.Uint8, 1, 16), any_tensor(Int64, 1, 8), any_tensor(Int32, 1, 16)),
        (Int32(0), Int64(0)),
        Int32(1),
    )
