# mypy: ignore-errors
"""Tiles that one warp of a CTA finds, ahead of the warps that work on them: a ring in shared
memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from . import ptx
from .persistent import advance_pipeline

__all__ = ["NONE", "TileRing"]

_SLOTS = 4  # tiles that may be ahead, where all of them are known
NONE = -1  # in place of the first integer of a tile: there are no more
_BYTES = 16  # of a slot: four integers


@dataclass(frozen=True)
class TileRing:
    """Every tile has a ``turn``, from 0 on.

    Attributes:
        slots: their address.
        full, empty: mbarriers, one a slot.
        depth: how many slots there are.
    """

    slots: Any
    full: Any
    empty: Any
    depth: int = _SLOTS

    @classmethod
    def allocate(cls, memory, depth: int = _SLOTS) -> TileRing:
        slots = memory.allocate_array(Int32, depth * _BYTES // 4, byte_alignment=_BYTES)
        barriers = memory.allocate_array(cutlass.Int64, 2 * depth)
        return cls(slots.toint(), barriers, barriers + depth, depth)

    def init_barriers(self, readers: int) -> None:
        """``readers``: warps that read each tile. One thread calls it."""
        for i in range(self.depth):
            cute.arch.mbarrier_init(self.full + i, 1)
            cute.arch.mbarrier_init(self.empty + i, readers)

    @cute.jit
    def write(self, turn, values):
        """Put four integers where the tile before has been read; by a warp."""
        self.put(turn % self.depth, turn // self.depth % 2, values)

    @cute.jit
    def read(self, turn):
        """The four integers of a tile; by a warp, once."""
        values = self.peek(turn)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.free(turn % self.depth)
        return values

    @cute.jit
    def peek(self, turn):
        """The same, by a warp that has not read them yet, and will."""
        words = self.look(turn % self.depth, turn // self.depth % 2)
        return [cute.arch.make_warp_uniform(each) for each in words]

    # --- by slot, and the parity of how often it has been used ---

    def advance(self, slot, phase):
        return advance_pipeline(slot, phase, self.depth)

    @cute.jit
    def put(self, slot, phase, values):
        """As :meth:`write`."""
        self.await_room(slot, phase)
        with cute.arch.elect_one():
            ptx.store_shared(self.slots + slot * _BYTES, [*values], _BYTES)
            cute.arch.mbarrier_arrive(self.full + slot)

    def await_room(self, slot, phase) -> None:
        """Wait until the tile before has been read."""
        cute.arch.mbarrier_wait(self.empty + slot, phase ^ 1)

    def look(self, slot, phase) -> list:
        """The four integers of a tile; by any threads."""
        cute.arch.mbarrier_wait(self.full + slot, phase)
        words = ptx.load_shared(self.slots + slot * _BYTES, _BYTES)
        return [Int32(each) for each in words]

    def free(self, slot) -> None:
        """Say that a warp has read a tile; by one of its threads."""
        cute.arch.mbarrier_arrive(self.empty + slot)
