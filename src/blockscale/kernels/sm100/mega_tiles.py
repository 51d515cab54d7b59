# mypy: ignore-errors
"""Tiles of both products of a mega MoE, whose rows are in rings; and what waits for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute, select_

from ..mega.rings import Rings
from .config import TILE_M
from .mega_config import MegaConfig
from .roles import Loader
from .tiles import Tile

__all__ = ["MegaLoader", "MegaTile", "MegaTiles"]


@dataclass(frozen=True)
class MegaTile(Tile):
    """A CTA's part of one of the products.

    Attributes:
        second: 1 of the second product, else 0.
        slot, turn: of the unit in the rings, and how many units had the slot before.
        first, rows: the number of the CTA's first row, and how many rows it has: fewer than 1 where
            it has none.
    """

    second: Any = None
    slot: Any = None
    turn: Any = None
    first: Any = None
    rows: Any = None


@dataclass(frozen=True)
class MegaTiles:
    """Tells where tiles are. ``rank``: of the CTA in its cluster."""

    config: MegaConfig
    rank: Any

    def tile(self, words) -> MegaTile:
        """The tile that four integers of the ring stand for, as ``mega.order.Finder`` puts them."""
        config, sizes = self.config, self.config.sizes
        second, unit = words[0] >> 30, words[0] & ((1 << 30) - 1)
        slot, turn = unit % config.ring_units, unit // config.ring_units
        across, group = words[1] >> 16, words[1] & 0xFFFF
        down = slot * config.ctas + self.rank  # blocks of the ring
        made = []
        for i, each in enumerate((config.up, config.down)):
            columns = (sizes.intermediate, sizes.hidden)[i]
            column = across * each.tile[1]
            halves = group * each.b_halves
            b_scale = halves * (columns // TILE_M) + column // TILE_M
            made.append((column, halves * columns + column, b_scale))
        column, b_row, b_scale = (
            Int32(select_(second == 1, b, a)) for a, b in zip(*made, strict=True)
        )
        row, part = down * TILE_M, self.rank * TILE_M
        rows, k_blocks = (words[3] & 0xFFFF) - part, words[3] >> 16
        return MegaTile(
            row,
            column,
            (row, b_row),
            (down, b_scale),
            k_blocks,
            group=group,
            second=second,
            slot=slot,
            turn=turn,
            first=words[2] + part,
            rows=rows,
        )


class MegaLoader(Loader):
    """Keeps the stages filled: ``up`` and ``down`` load their products' tiles, when the rows that
    these read are there, and room for what they store."""

    def __init__(self, rings: Rings, up: Loader, down: Loader):
        super().__init__(up.pipeline, [])
        self.rings, self.up, self.down = rings, up, down

    def begin_tile(self, tile) -> None:
        self.rings.await_room(tile)
        self.rings.await_rows(tile)

    @cute.jit
    def fill(self, stage, barrier, tile, k_block):
        if tile.second == 0:
            self.up.fill(stage, barrier, tile, k_block)
        else:
            self.down.fill(stage, barrier, tile, k_block)
