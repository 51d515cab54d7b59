# mypy: ignore-errors
"""Tiles of both products of a mega MoE, whose rows are in rings; and what waits for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute, select_

from ..mega.order import NONE
from ..mega.peers import Peers
from ..mega.signals import fence_async, wait_for
from .config import EPILOGUE_WARPS, TILE_M
from .grouped_scheduler import TilePipeline
from .mega_config import MegaConfig
from .roles import Loader
from .tiles import Tile

__all__ = ["MegaLoader", "MegaPipeline", "MegaTile", "MegaTiles"]


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
        """Of what the ring has: ``mega.order.Finder``."""
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


class MegaPipeline(TilePipeline):
    """A ring of tiles that ends with a unit that is none."""

    def more(self, words):
        return words[0] != NONE


class MegaLoader(Loader):
    """Keeps the stages filled: ``up`` and ``down`` load their products' tiles, when the rows that
    these read are there, and room for what they store."""

    def __init__(self, config: MegaConfig, peers: Peers, up: Loader, down: Loader):
        super().__init__(up.pipeline, [])
        self.mega, self.peers, self.up, self.down = config, peers, up, down

    def begin_tile(self, tile) -> None:
        self.await_room(tile)
        self.await_rows(tile)

    @cute.jit
    def await_room(self, tile):
        """Until the second ring has room for a tile of the first product. It is long there, so the
        epilogue need not wait for the answer."""
        if tile.second == 0:
            read = tile.turn * (self.mega.across[1] * self.mega.ctas)
            wait_for(self.peers.signal("down_done", tile.slot), read)

    @cute.jit
    def await_rows(self, tile):
        config, turns = self.mega, tile.turn + 1
        stored = config.across[0] * config.ctas * EPILOGUE_WARPS
        if tile.second == 0:
            wait_for(self.peers.signal("up_full", tile.slot), turns * config.unit_rows)
        else:
            wait_for(self.peers.signal("down_full", tile.slot), turns * stored)
        fence_async()

    @cute.jit
    def fill(self, stage, barrier, tile, k_block):
        if tile.second == 0:
            self.up.fill(stage, barrier, tile, k_block)
        else:
            self.down.fill(stage, barrier, tile, k_block)
