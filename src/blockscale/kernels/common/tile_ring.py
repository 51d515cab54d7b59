# mypy: ignore-errors
"""Tiles that one warp of a CTA finds, ahead of the warps that work on them: a ring in shared
memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from . import ptx

__all__ = ["TileRing"]

_SLOTS = 4  # tiles that may be ahead
_BYTES = 16  # of a slot: four integers


@dataclass(frozen=True)
class TileRing:
    """Every tile has a ``turn``, from 0 on.

    Attributes:
        slots: their address.
        full, empty: mbarriers, one a slot.
    """

    slots: Any
    full: Any
    empty: Any

    @classmethod
    def allocate(cls, memory) -> TileRing:
        slots = memory.allocate_array(Int32, _SLOTS * _BYTES // 4, byte_alignment=_BYTES).toint()
        barriers = memory.allocate_array(cutlass.Int64, 2 * _SLOTS)
        return cls(slots, barriers, barriers + _SLOTS)

    def init_barriers(self, readers: int) -> None:
        """``readers``: warps that read each tile. One thread calls it."""
        for i in range(_SLOTS):
            cute.arch.mbarrier_init(self.full + i, 1)
            cute.arch.mbarrier_init(self.empty + i, readers)

    @cute.jit
    def write(self, turn, values):
        """Put four integers where the tile before has been read; by a warp."""
        slot, phase = turn % _SLOTS, turn // _SLOTS % 2
        cute.arch.mbarrier_wait(self.empty + slot, phase ^ 1)
        with cute.arch.elect_one():
            ptx.store_shared(self.slots + slot * _BYTES, [*values], _BYTES)
            cute.arch.mbarrier_arrive(self.full + slot)

    @cute.jit
    def read(self, turn):
        """The four integers of a tile; by a warp, once."""
        values = self.peek(turn)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + turn % _SLOTS)
        return values

    @cute.jit
    def peek(self, turn):
        """The same, by a warp that has not read them yet, and will."""
        slot, phase = turn % _SLOTS, turn // _SLOTS % 2
        cute.arch.mbarrier_wait(self.full + slot, phase)
        words = ptx.load_shared(self.slots + slot * _BYTES, _BYTES)
        return [cute.arch.make_warp_uniform(Int32(each)) for each in words]
