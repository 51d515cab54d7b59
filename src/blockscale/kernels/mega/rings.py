# mypy: ignore-errors
"""What a loader waits for before it loads a tile: rows in one ring, and room in the other."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import cute

from ..ranks.signals import fence_async, wait_for
from .peers import Peers

__all__ = ["Rings"]


@dataclass(frozen=True)
class Rings:
    """Of tiles that have ``second``, ``slot`` and ``turn``.

    Attributes:
        unit_rows: rows of a unit.
        readers: CTAs that read a unit of the second ring, once for each tile.
        writers: warps that store a unit of it, likewise.
    """

    peers: Peers
    unit_rows: int
    readers: int
    writers: int

    @cute.jit
    def await_room(self, tile):
        """Until the second ring has room for a tile of the first product. It is long there, so no
        epilogue need wait for the answer."""
        if tile.second == 0:
            wait_for(self.peers.signal("down_done", tile.slot), tile.turn * self.readers)

    @cute.jit
    def await_rows(self, tile):
        """Until the rows that a tile reads are there, for TMA, too."""
        turns = tile.turn + 1
        if tile.second == 0:
            wait_for(self.peers.signal("up_full", tile.slot), turns * self.unit_rows)
        else:
            wait_for(self.peers.signal("down_full", tile.slot), turns * self.writers)
        fence_async()
