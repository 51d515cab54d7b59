# mypy: ignore-errors
"""What single threads of two warps do: load tiles, and start the instructions that multiply them.

Both go through the K blocks of the same tiles. Of two blocks that work together each loads its own
rows, half of B, and scales of all columns; the even one multiplies for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute

from ..common.persistent import advance_pipeline
from ..common.schedule import Raster
from . import ptx
from .config import ROW, SCALE_COLUMNS, TILE_BYTES, Config
from .kinds import STEPS
from .turns import Turns

UNIT = 16  # bytes, of a descriptor's address

__all__ = ["Loader", "Multiplier", "Pipeline", "Place"]


class Place:
    """Where a block is in its cluster, and which others it shares with.

    Attributes:
        rank, down, across: of the block; the tile is so many further.
        pair_rank: of the block that multiplies for this one.
    """

    def __init__(self, config: Config, rank):
        self.config, self.rank = config, rank
        self.down, self.across = rank % config.cluster[0], rank // config.cluster[0]

    def row_mask(self, pair: bool):
        """Blocks with the same rows of A; ``pair``: or those of the other one."""
        down, across = self.config.cluster
        ranks = sum(1 << down * i for i in range(across))
        if pair and self.config.ctas == 2:
            return Int32(3 * ranks) << (self.down & ~1)
        return Int32(ranks) << self.down

    def column_mask(self, every: int):
        """Blocks with the same columns, every so many-th of them."""
        down = self.config.cluster[0]
        ranks = sum(1 << i for i in range(0, down, every))
        return Int32(ranks) << (self.across * down + self.down % every)

    def shares(self) -> list:
        """Of A and of B: into how many parts a tile is cut, this block's, and who gets it."""
        ctas, parts = self.config.ctas, self.config.parts
        rows = self.row_mask(False) if parts[0] > 1 else None
        columns = self.column_mask(ctas) if parts[1] > 1 else None
        return [(parts[0], self.across, rows), (parts[1], self.down // ctas, columns)]

    def loaders(self):
        """Blocks that load something for this one, or for that beside it."""
        if self.config.blocks == 1:
            return None
        return self.row_mask(True) | self.column_mask(1)

    def pair(self):
        """Both blocks that work together."""
        return None if self.config.ctas == 1 else Int32(3) << (self.rank & ~1)


@dataclass(frozen=True)
class Pipeline:
    """What the roles of a block share.

    Attributes:
        turns: which tiles the cluster takes.
        tiles: clusters of tiles down and across the output.
        extent: rows and columns of the output.
        blocks: along K.
        shared: addresses of A, of B and of their scales, all stages.
        full, empty: addresses of barriers, of the stages.
        ready, freed: of the sums, for those who store and for the one who multiplies.
        memory: address of Tensor Memory.
    """

    config: Config
    raster: Raster
    place: Place
    turns: Turns
    tiles: Any
    extent: tuple
    blocks: Any
    shared: list
    full: Any
    empty: Any
    ready: Any
    freed: Any
    memory: Any

    def tile(self, index):
        """First row and column of this block's part."""
        return self.raster.tile(index, self.tiles, self.place.rank)

    def next_stage(self, stage, phase):
        return advance_pipeline(stage, phase, self.config.stages)


class Loader:
    """Keeps the stages filled. ``maps``: addresses of tensor maps of A, B and their scales."""

    def __init__(self, pipeline: Pipeline, maps: list):
        self.pipeline, self.maps = pipeline, maps

    @cute.jit
    def __call__(self):
        config = self.pipeline.config
        stage, phase = Int32(0), Int32(1)
        index, turn, turn_phase = self.pipeline.turns.first()
        while index >= 0:
            self.pipeline.turns.expect(turn)
            row, column = self.pipeline.tile(index)
            for block in range(self.pipeline.blocks):
                ptx.wait_for_stage(self.pipeline.empty + stage * 8, phase)
                barrier = self.pipeline.full + stage * 8
                if self.pipeline.place.rank % config.ctas == 0:
                    ptx.expect(barrier, config.ctas * config.loaded_bytes)
                self.fill(stage, barrier, (row, column), block)
                stage, phase = self.pipeline.next_stage(stage, phase)
            index, turn, turn_phase = self.pipeline.turns.next(turn, turn_phase)
        for _ in range(config.stages):  # stay until nobody reads or signals any more
            ptx.wait_for_stage(self.pipeline.empty + stage * 8, phase)
            stage, phase = self.pipeline.next_stage(stage, phase)

    def fill(self, stage, barrier, starts, block) -> None:
        """Load a K block of the tile that starts at a row of A, and at a row of B."""
        config, place = self.pipeline.config, self.pipeline.place
        kind, ctas, shared = config.kind, config.ctas, self.pipeline.shared
        if ctas > 1:
            barrier = barrier & ptx.EVEN
        first = 0, place.down % ctas * config.b_rows
        for i, (parts, part, mask) in enumerate(place.shares()):
            rows = (config.tile[0], config.b_rows)[i]
            base = shared[i] + stage * (rows * ROW)
            if config.majors[i] == "mn":  # panels, with a row for each element along K
                down = part * (kind.block_k // parts)
                boxes = [
                    (panel * kind.block_k + down, block * kind.block_k + down, panel * ROW)
                    for panel in range(rows // ROW)
                ]
                boxes = [
                    (line, (down, self.row(i, starts[i], first[i] + within)))
                    for line, down, within in boxes
                ]
            else:
                across = block * (kind.block_k if config.unpacked[i] else ROW)
                count = rows // parts
                lines = [part * count + line for line in range(0, count, config.box_rows[i])]
                boxes = [
                    (line, (self.row(i, starts[i], first[i] + line), across)) for line in lines
                ]
            for line, position in boxes:
                ptx.load_box(base + line * ROW, self.maps[i], position, barrier, mask, ctas)
            self.fill_scales(i, stage, barrier, starts[i], block)

    def fill_scales(self, i: int, stage, barrier, start, block) -> None:
        """Load a K block's scales of A, of B: those of all columns."""
        config, words = self.pipeline.config, self.pipeline.config.scale_words
        boxes = (1, config.parts_of_columns)[i]
        rows = config.scale_rows[i] // boxes
        for box in range(boxes):
            to = self.pipeline.shared[2 + i] + (stage * boxes + box) * (rows * words * 8)
            row = start // 128
            if box > 0:
                row = row + (self.pipeline.extent[1] + 127) // 128
            position = row, block * words
            ptx.load_box(to, self.maps[2 + i], position, barrier, None, config.ctas)

    def row(self, i: int, start, within):
        """Row of A, of B, that is the ``within``-th of the tile from ``start`` on. With SwiGLU the
        second half of B's rows are those of up."""
        config = self.pipeline.config
        if i == 0 or config.parts_of_columns == 1:
            return start + within
        half = config.tile[1]
        return start + within % half + within // half * self.pipeline.extent[1]


class Multiplier:
    """Starts all products."""

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        config = pipeline.config
        aparts = [config.kind.block_k * ROW if each == "mn" else 16 for each in config.majors]
        pairs = zip(pipeline.shared, [*aparts, 16, 16], strict=True)
        self.matrices = [ptx.matrix(*pair) for pair in pairs]

    @cute.jit
    def __call__(self):
        config = self.pipeline.config
        stage, phase = Int32(0), Int32(0)
        free, free_phase, which = Int32(0), Int32(1), Int32(0)
        index, turn, turn_phase = self.pipeline.turns.first()
        while index >= 0:
            ptx.wait(self.pipeline.freed + free * 8, free_phase, config.ctas)
            ptx.sums_known()
            for block in range(self.pipeline.blocks):
                ptx.wait_for_stage(self.pipeline.full + stage * 8, phase)
                ptx.sums_known()
                self.add(stage, which * config.apart, block)
                loaders = self.pipeline.place.loaders()
                ptx.commit(self.pipeline.empty + stage * 8, loaders, config.ctas)
                stage, phase = self.pipeline.next_stage(stage, phase)
            pair = self.pipeline.place.pair()
            ptx.commit(self.pipeline.ready + which * 8, pair, config.ctas)
            which = which ^ 1
            free, free_phase = advance_pipeline(free, free_phase, config.sums)
            index, turn, turn_phase = self.pipeline.turns.next(turn, turn_phase)

    def add(self, stage, first_column, block) -> None:
        """Start the instructions of a K block."""
        config, memory = self.pipeline.config, self.pipeline.memory
        kind, ctas = config.kind, config.ctas
        columns = [memory + each for each in config.scale_columns]
        sizes = [rows * kind.scale_tiles * TILE_BYTES for rows in config.scale_rows]
        sizes = [config.tile[0] * ROW, config.b_rows * ROW, *sizes]
        starts = [
            matrix + stage * (size // UNIT)
            for matrix, size in zip(self.matrices, sizes, strict=True)
        ]
        for i, rows in enumerate(config.scale_rows):
            for tile in range(rows * kind.scale_tiles):
                down, along = divmod(tile, kind.scale_tiles)
                # those that one instruction reads lie together
                to = columns[i] + (along * rows + down) * SCALE_COLUMNS
                ptx.copy_scales(to, starts[2 + i] + tile * (TILE_BYTES // UNIT), ctas)
        strides = [kind.k * ROW if each == "mn" else ROW // STEPS for each in config.majors]
        for step in range(STEPS):
            along, byte = kind.scale_place(step)
            shape = config.instruction | byte << 4 | byte << 29
            scales = [
                column + along * rows * SCALE_COLUMNS
                for column, rows in zip(columns, config.scale_rows, strict=True)
            ]
            add = Int32(block > 0) if step == 0 else Int32(1)
            a, b = (starts[i] + step * (strides[i] // UNIT) for i in range(2))
            sums = memory + first_column
            ptx.multiply(sums, a, b, shape, *scales, add, kind.name, ctas)
