# mypy: ignore-errors
"""What loads tiles of a mega MoE: rows of experts from rings, matrices, and their scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, cute, range_constexpr, select_

from ..common.copies import Copies, TmaTiles
from ..common.pipeline import Pipeline
from ..common.tile_ring import NONE, TileRing
from ..mega.buffers import MULTIPLE
from ..mega.rings import Rings
from . import ptx
from .mega_config import COLUMNS, MegaConfig

__all__ = ["Boxes", "MegaFetcher", "MegaLoader", "MegaTile", "tile_of"]


@dataclass(frozen=True)
class MegaTile:
    """A tile of one of the products.

    Attributes:
        second: 1 of the second product, else 0.
        slot, turn: of the unit in the rings, and how many units had the slot before.
        column: the first one, of the result; ``group``: the expert.
        a_row: the first row in the ring; ``b_rows``: of both halves of the tile's columns.
        first, rows: the number of the unit's first row, and how many rows it has.
        k_blocks: along K.
    """

    second: Any
    slot: Any
    turn: Any
    column: Any
    group: Any
    a_row: Any
    b_rows: tuple
    first: Any
    rows: Any
    k_blocks: Any


def tile_of(config: MegaConfig, words) -> MegaTile:
    """The tile that four integers of the ring stand for, as ``mega.order.Finder`` puts them."""
    sizes, ring = config.sizes, config.sizes.ring_rows // config.unit_rows
    second, unit = words[0] >> 30, words[0] & ((1 << 30) - 1)
    across, group = words[1] >> 16, words[1] & 0xFFFF
    wide = across * COLUMNS
    gate = group * (2 * sizes.intermediate) + across * MULTIPLE
    down = group * sizes.hidden + wide
    halves = (gate, down), (gate + sizes.intermediate, down + MULTIPLE)
    return MegaTile(
        second=second,
        slot=unit % ring,
        turn=unit // ring,
        column=Int32(select_(second == 1, wide, across * MULTIPLE)),
        group=group,
        a_row=unit % ring * config.unit_rows,
        b_rows=tuple(Int32(select_(second == 1, b, a)) for a, b in halves),
        first=words[2],
        rows=words[3] & 0xFFFF,
        k_blocks=words[3] >> 16,
    )


@dataclass(frozen=True)
class Boxes:
    """What TMA loads for a stage of one tensor of each product: a box or two, whose first elements
    are ``coords(tile, k_block, product)``."""

    copies: Copies
    coords: Callable[..., list]


@dataclass(frozen=True)
class MegaLoader:
    """Keeps the stages filled by TMA, when the rows that a tile reads are there, and room for what
    it stores: a warp.

    ``loads``: of both products those of all ``boxes``.
    """

    config: MegaConfig
    rings: Rings
    pipeline: Pipeline
    ring: TileRing
    boxes: tuple[Boxes, ...]
    loads: list[list[TmaTiles]]

    @cute.jit
    def __call__(self):
        stage, phase, turn = Int32(0), Int32(1), Int32(0)
        words = self.ring.read(turn)
        while words[0] != NONE:
            tile = tile_of(self.config, words)
            self.rings.await_room(tile)
            self.rings.await_rows(tile)
            cute.arch.sync_warp()
            for k_block in range(tile.k_blocks):
                self.pipeline.producer_acquire(stage, phase)
                barrier = self.pipeline.producer_barrier(stage, phase)
                if tile.second == 0:
                    self.fill(0, tile, k_block, stage, barrier)
                else:
                    self.fill(1, tile, k_block, stage, barrier)
                stage, phase = self.pipeline.producer_next(stage, phase)
            turn = turn + 1
            words = self.ring.read(turn)

    def fill(self, product: int, tile, k_block, stage, barrier) -> None:
        """Load a K block."""
        places = [each.coords(tile, k_block, product) for each in self.boxes]
        nbytes = sum(
            len(some) * each.copies.moved for some, each in zip(places, self.boxes, strict=True)
        )
        with cute.arch.elect_one():
            ptx.mbarrier_arrive_expect_tx(barrier.toint(), nbytes)
        for load, some in zip(self.loads[product], places, strict=True):
            for i, place in enumerate(some):
                load.load(stage * len(some) + i, place, barrier)


@dataclass(frozen=True)
class MegaFetcher:
    """Brings 128 x 128 scales of both halves of a tile's columns to the stages, at ``address``: a
    warp. ``scales``: (experts, rows / 128, K / 128) of each product.
    """

    config: MegaConfig
    pipeline: Pipeline
    ring: TileRing
    scales: tuple
    address: Any

    @cute.jit
    def __call__(self):
        stage, phase, turn = Int32(0), Int32(1), Int32(0)
        words = self.ring.read(turn)
        while words[0] != NONE:
            tile = tile_of(self.config, words)
            row = tile.column // MULTIPLE
            if tile.second == 0:
                up = row + self.config.sizes.intermediate // MULTIPLE
                stage, phase = self.fetch(self.scales[0], tile, (row, up), stage, phase)
            else:
                stage, phase = self.fetch(self.scales[1], tile, (row, row + 1), stage, phase)
            turn = turn + 1
            words = self.ring.read(turn)

    @cute.jit
    def fetch(self, scales, tile, rows, stage, phase):
        """A lane has those of every 32nd K block, read long before a stage is free for them."""
        lane, apart = cute.arch.lane_idx(), self.config.product.b_scales_apart
        own = scales[(tile.group, None, None)]
        for first in range(0, tile.k_blocks, 32):
            values = [Float32(0), Float32(0)]
            for i in range_constexpr(2):
                if rows[i] < own.shape[0] and first + lane < tile.k_blocks:
                    values[i] = own[rows[i], first + lane]
            count = tile.k_blocks - first
            for i in range(Int32(select_(count < 32, count, Int32(32)))):
                self.pipeline.producer_acquire(stage, phase)
                if lane == i:
                    target = self.address + stage * apart
                    for j in range_constexpr(2):
                        ptx.st_shared(target + 4 * j, [values[j]])
                    ptx.mbarrier_arrive(self.pipeline.producer_barrier(stage, phase).toint())
                stage, phase = self.pipeline.producer_next(stage, phase)
        return stage, phase
