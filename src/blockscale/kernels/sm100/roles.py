# mypy: ignore-errors
"""The two roles of single threads: TMA loads of tiles, and the MMAs that multiply them.

Both go through the K blocks of the same tiles. Each CTA of a pair loads its own rows of A, half of
B, and the scales of all columns; the even one issues the MMAs for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, const_expr, cute

from ...formats import GROUP_TILE
from ..common.persistent import advance_pipeline
from . import ptx
from .clc_scheduler import ClcPipeline
from .config import ROW_BYTES, SCALE_COLUMNS, SCALE_TILE_BYTES, Config
from .grouped_scheduler import GroupedTiles, TilePipeline
from .kinds import K_STEPS
from .tiles import DenseTiles

UNIT = 16  # bytes that one step of a descriptor's address is worth

__all__ = ["CtaCoord", "Loader", "Mma", "Pipeline"]


class CtaCoord:
    """Where a CTA is in its cluster, and with which other CTAs it shares tiles.

    Attributes:
        rank: the CTA's rank in the cluster.
        down, across: the CTA's row and column in the cluster.
    """

    def __init__(self, config: Config, rank):
        self.config, self.rank = config, rank
        self.down, self.across = rank % config.cluster[0], rank // config.cluster[0]

    def row_mask(self, pair: bool):
        """The CTAs in the same row of the cluster; with ``pair`` also those in its pair's row."""
        down, across = self.config.cluster
        ranks = sum(1 << down * i for i in range(across))
        if pair and self.config.ctas == 2:
            return Int32(3 * ranks) << (self.down & ~1)
        return Int32(ranks) << self.down

    def column_mask(self, every: int):
        """Every ``every``-th of the CTAs in the same column of the cluster, this one included."""
        down = self.config.cluster[0]
        ranks = sum(1 << i for i in range(0, down, every))
        return Int32(ranks) << (self.across * down + self.down % every)

    def multicast(self) -> list:
        """For A and for B: how many CTAs load a tile together, which part of it this CTA loads, and
        the mask of the CTAs that receive it."""
        ctas, shares = self.config.ctas, self.config.multicast_ctas
        rows = self.row_mask(False) if shares[0] > 1 else None
        columns = self.column_mask(ctas) if shares[1] > 1 else None
        return [(shares[0], self.across, rows), (shares[1], self.down // ctas, columns)]

    def loader_mask(self):
        """The CTAs that load something for this one or for the other one of its pair."""
        if self.config.cluster_size == 1:
            return None
        return self.row_mask(True) | self.column_mask(1)

    def pair_mask(self):
        """Both CTAs of a pair."""
        return None if self.config.ctas == 1 else Int32(3) << (self.rank & ~1)


@dataclass(frozen=True)
class Pipeline:
    """What the roles of a CTA share.

    Attributes:
        cta: where the CTA is in its cluster.
        clc: gives the tiles that the cluster takes.
        tiles: tells where they are.
        extent: the rows and columns of the output.
        shared: the addresses of A, of B and of their scales in shared memory, all stages.
        full, empty: the addresses of the stages' mbarriers.
        acc_full, acc_empty: the addresses of the accumulators' mbarriers.
        tmem: the address of Tensor Memory.
    """

    config: Config
    cta: CtaCoord
    clc: ClcPipeline | TilePipeline
    tiles: DenseTiles | GroupedTiles
    extent: tuple
    shared: list
    full: Any
    empty: Any
    acc_full: Any
    acc_empty: Any
    tmem: Any

    def next_stage(self, stage, phase):
        """The stage and phase after these."""
        return advance_pipeline(stage, phase, self.config.stages)


class Loader:
    """Keeps the stages filled. ``maps``: the addresses of tensor maps of A, B and their scales."""

    def __init__(self, pipeline: Pipeline, maps: list):
        self.pipeline, self.maps = pipeline, maps

    @cute.jit
    def __call__(self):
        config = self.pipeline.config
        stage, phase = Int32(0), Int32(1)
        index, clc_stage, clc_phase = self.pipeline.clc.first()
        while self.pipeline.clc.more(index):
            self.pipeline.clc.expect(clc_stage)
            tile = self.pipeline.tiles.tile(index)
            self.begin_tile(tile)
            for k_block in range(tile.k_blocks):
                ptx.mbarrier_wait_cta(self.pipeline.empty + stage * 8, phase)
                barrier = self.pipeline.full + stage * 8
                if self.pipeline.cta.rank % config.ctas == 0:
                    ptx.mbarrier_arrive_expect_tx(barrier, config.ctas * config.loaded_bytes)
                self.fill(stage, barrier, tile, k_block)
                stage, phase = self.pipeline.next_stage(stage, phase)
            index, clc_stage, clc_phase = self.pipeline.clc.next(clc_stage, clc_phase)
        for _ in range(config.stages):  # stay until no other CTA reads or signals any more
            ptx.mbarrier_wait_cta(self.pipeline.empty + stage * 8, phase)
            stage, phase = self.pipeline.next_stage(stage, phase)

    def begin_tile(self, tile) -> None:
        """Do what comes before the loads of a tile: nothing here."""

    def fill(self, stage, barrier, tile, k_block) -> None:
        """Load a K block of a tile."""
        config, cta = self.pipeline.config, self.pipeline.cta
        kind, ctas, shared = config.kind, config.ctas, self.pipeline.shared
        if ctas > 1:
            barrier = barrier & ptx.EVEN_CTA
        first = 0, cta.down % ctas * config.b_rows
        for i, (shares, share, mask) in enumerate(cta.multicast()):
            rows = (config.tile[0], config.b_rows)[i]
            base = shared[i] + stage * (rows * ROW_BYTES)
            if config.majors[i] == "mn":  # panels, with a row for each element along K
                down = share * (kind.block_k // shares)
                boxes = [
                    (
                        panel * kind.block_k + down,
                        k_block * kind.block_k + down,
                        panel * ROW_BYTES,
                    )
                    for panel in range(rows // ROW_BYTES)
                ]
                boxes = [
                    (line, (down, self.row(i, tile.starts[i], first[i] + within)))
                    for line, down, within in boxes
                ]
            else:
                across = self.along(
                    tile, k_block, kind.block_k if config.unpacked[i] else ROW_BYTES
                )
                count = rows // shares
                lines = [share * count + line for line in range(0, count, config.box_rows[i])]
                boxes = [
                    (line, (self.row(i, tile.starts[i], first[i] + line), across)) for line in lines
                ]
            for line, position in boxes:
                ptx.tma_load(base + line * ROW_BYTES, self.maps[i], position, barrier, mask, ctas)
            self.fill_scales(i, stage, barrier, tile, k_block)

    def along(self, tile, k_block, width: int):
        """Where a K block, of so much ``width``, begins along K."""
        if tile.k_begin is None:
            return k_block * width
        return k_block * width + tile.k_begin * (width * GROUP_TILE // self.block_k)

    @property
    def block_k(self) -> int:
        return self.pipeline.config.kind.block_k

    def fill_scales(self, i: int, stage, barrier, tile, k_block) -> None:
        """Load a K block's scales of A or of B; those of B for all columns of the pair's tile."""
        config, words = self.pipeline.config, self.pipeline.config.scale_words
        boxes = (1, config.b_halves)[i]
        rows = config.scale_rows[i] // boxes
        for box in range(boxes):
            to = self.pipeline.shared[2 + i] + (stage * boxes + box) * (rows * words * 8)
            row = tile.scale_starts[i]
            if box > 0:
                row = row + (self.pipeline.extent[1] + 127) // 128
            position = row, self.along(tile, k_block, words)
            ptx.tma_load(to, self.maps[2 + i], position, barrier, None, config.ctas)

    def row(self, i: int, start, within):
        """The row of A or of B that is the ``within``-th of the tile that begins at ``start``. With
        SwiGLU the second half of the tile's rows of B are those of up."""
        config = self.pipeline.config
        if i == 0 or config.b_halves == 1:
            return start + within
        half = config.tile[1]
        return start + within % half + within // half * self.pipeline.extent[1]


class Mma:
    """Issues all MMAs."""

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        config = pipeline.config
        panels = [config.kind.block_k * ROW_BYTES if each == "mn" else 16 for each in config.majors]
        pairs = zip(pipeline.shared, [*panels, 16, 16], strict=True)
        self.descriptors = [ptx.smem_descriptor(*pair) for pair in pairs]
        # the MMAs of a K block that are always of the same group
        k_grouped = config.grouping == "k"
        self.first_steps = min(GROUP_TILE // config.kind.k, K_STEPS) if k_grouped else K_STEPS

    @cute.jit
    def __call__(self):
        config = self.pipeline.config
        stage, phase = Int32(0), Int32(0)
        free, free_phase, acc = Int32(0), Int32(1), Int32(0)
        index, clc_stage, clc_phase = self.pipeline.clc.first()
        while self.pipeline.clc.more(index):
            tile = self.pipeline.tiles.tile(index)
            ptx.mbarrier_wait(self.pipeline.acc_empty + free * 8, free_phase, config.ctas)
            ptx.fence_after_thread_sync()
            for k_block in range(tile.k_blocks):
                ptx.mbarrier_wait_cta(self.pipeline.full + stage * 8, phase)
                ptx.fence_after_thread_sync()
                where = self.copy_scales(stage), acc * config.acc_stride, k_block
                self.issue(0, self.first_steps, *where)
                if const_expr(self.first_steps < K_STEPS):  # noqa: SIM102 - known when compiling
                    if tile.k_begin + k_block * 2 + 1 < tile.k_end:  # else they are another group's
                        self.issue(self.first_steps, K_STEPS, *where)
                loaders = self.pipeline.cta.loader_mask()
                ptx.tcgen05_commit(self.pipeline.empty + stage * 8, loaders, config.ctas)
                stage, phase = self.pipeline.next_stage(stage, phase)
            pair = self.pipeline.cta.pair_mask()
            ptx.tcgen05_commit(self.pipeline.acc_full + acc * 8, pair, config.ctas)
            acc = acc ^ 1
            free, free_phase = advance_pipeline(free, free_phase, config.acc_stages)
            index, clc_stage, clc_phase = self.pipeline.clc.next(clc_stage, clc_phase)

    def copy_scales(self, stage) -> tuple[list, list]:
        """Copy a stage's scales to Tensor Memory; the descriptors of A and B, and where their
        scales are."""
        config, tmem = self.pipeline.config, self.pipeline.tmem
        kind, ctas = config.kind, config.ctas
        columns = [tmem + each for each in config.scale_columns]
        sizes = [rows * kind.scale_tiles * SCALE_TILE_BYTES for rows in config.scale_rows]
        sizes = [config.tile[0] * ROW_BYTES, config.b_rows * ROW_BYTES, *sizes]
        starts = [
            descriptor + stage * (size // UNIT)
            for descriptor, size in zip(self.descriptors, sizes, strict=True)
        ]
        for i, rows in enumerate(config.scale_rows):
            for tile in range(rows * kind.scale_tiles):
                down, along = divmod(tile, kind.scale_tiles)
                # the tiles that one MMA reads are neighbours
                to = columns[i] + (along * rows + down) * SCALE_COLUMNS
                ptx.tcgen05_cp_scales(to, starts[2 + i] + tile * (SCALE_TILE_BYTES // UNIT), ctas)
        return starts[:2], columns

    def issue(self, first: int, end: int, operands, acc_column, k_block) -> None:
        """Issue some of the MMAs, of ``operands`` as :meth:`copy_scales` has them."""
        config, tmem = self.pipeline.config, self.pipeline.tmem
        kind, ctas, (starts, columns) = config.kind, config.ctas, operands
        strides = [
            kind.k * ROW_BYTES if each == "mn" else ROW_BYTES // K_STEPS for each in config.majors
        ]
        for step in range(first, end):
            along, byte = kind.scale_place(step)
            descriptor = config.instruction_descriptor | byte << 4 | byte << 29
            scales = [
                column + along * rows * SCALE_COLUMNS
                for column, rows in zip(columns, config.scale_rows, strict=True)
            ]
            accumulate = Int32(k_block > 0) if step == 0 else Int32(1)
            a, b = (starts[i] + step * (strides[i] // UNIT) for i in range(2))
            acc = tmem + acc_column
            ptx.tcgen05_mma(acc, a, b, scales, accumulate, descriptor, kind.name, ctas)
