# mypy: ignore-errors
"""Tiles between global and shared memory by TMA: rows of 128, 64 or 32 bytes, swizzled, or
scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import const_expr, cute
from cutlass.cute.nvgpu import cpasync

from . import shared

__all__ = ["Copies", "Panels", "TmaTiles"]

_SWIZZLES = {64: 2, 32: 1}  # bits that are changed, for rows of so many bytes


class Copies:
    """Boxes of one tensor in global memory, and ``slots`` of tiles in shared memory.

    A tile has ``tile`` (rows, columns) and is moved by one box, or by ``shares`` of them one above
    the other, each loaded by another block of a cluster for all of them. Only its first ``rows``
    and ``columns`` are moved, all by default: TMA takes longer to fill a row with zeros than to
    load it.
    """

    def __init__(
        self,
        kind,
        tile,
        slots: int,
        *,
        rows: int = 0,
        columns: int = 0,
        shares: int = 1,
        swizzled: bool = True,
    ):
        self.kind, self.tile, self.slots, self.shares = kind, tile, slots, shares
        self.rows, self.columns, self.swizzled = rows or tile[0], columns or tile[1], swizzled

    @property
    def swizzle(self):
        """Needs a compiler that runs."""
        return cute.make_swizzle(_SWIZZLES.get(self.tile[1] * self.kind.width // 8, 3), 4, 3)

    @property
    def box(self):
        return self.rows // self.shares, self.columns

    @property
    def nbytes(self) -> int:
        """Of a tile."""
        return self.tile[0] * self.tile[1] * self.kind.width // 8

    @property
    def moved(self) -> int:
        """Bytes of a tile that are."""
        return self.nbytes // (self.tile[0] * self.tile[1]) * self.rows * self.columns

    def describe(self, tensor, op=None):
        """On the host: atom and tensor of coordinates. ``op``: a store; else it loads."""
        if op is None:
            op = cpasync.CopyBulkTensorTileG2SOp()
            if self.shares > 1:
                op = cpasync.CopyBulkTensorTileG2SMulticastOp()
        rows, columns = self.box
        layout = cute.make_layout((rows, columns), stride=(columns, 1))
        if self.swizzled:
            layout = cute.make_composed_layout(self.swizzle, 0, layout)
        atom, view = cpasync.make_tiled_tma_atom(op, tensor, layout, self.box)
        return atom, view

    def allocate(self, memory):
        rows, columns = self.tile
        layout = cute.make_layout((rows, columns, self.slots), stride=(columns, 1, rows * columns))
        swizzle = self.swizzle if self.swizzled else None
        return memory.allocate_tensor(self.kind, layout, byte_alignment=1024, swizzle=swizzle)

    @cute.jit
    def clear(self, tiles, threads: cutlass.Constexpr):
        """Zeros where rows of tiles are not loaded, by all ``threads`` of a block, together."""
        if const_expr(self.rows < self.tile[0]):
            nbytes = self.tile[0] * self.tile[1] * self.kind.width // 8 * self.slots
            shared.clear(tiles.iterator.toint(), nbytes, threads, 16)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_threads()

    def pieces(self, atom, view, tiles, slot, position, share):
        """Both ends of a copy of the box whose first element is at ``position``."""
        moved = cute.domain_offset(position, view)
        target = cute.local_tile(tiles[(None, None, slot)], self.box, (share, 0))
        return cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(target, 0, 2),
            cute.group_modes(cute.local_tile(moved, self.box, (0, 0)), 0, 2),
        )

    def load(self, atom, view, tiles, slot, position, barrier, share=0):
        """Load a tile, or the ``share`` of it that is this block's, into a slot; by a warp."""
        row, column = position
        if self.shares > 1:
            row = row + share * self.box[0]
        shared, piece = self.pieces(atom, view, tiles, slot, (row, column), share)
        mask = cutlass.Int16((1 << self.shares) - 1)
        given = {"mcast_mask": mask} if self.shares > 1 else {}
        cute.copy(atom, piece, shared, tma_bar_ptr=barrier, **given)

    def store(self, atom, view, tiles, slot, position):
        """Store the box in a slot; by a warp."""
        shared, piece = self.pieces(atom, view, tiles, slot, position, 0)
        cute.copy(atom, shared, piece)


class Panels(Copies):
    """Tiles wider than what a row of shared memory holds: ``panels`` of them side by side, which
    are one above the other there, each moved as a tile of :class:`Copies` is."""

    def __init__(self, kind, tile, slots: int, panels: int, **options):
        super().__init__(kind, tile, slots * panels, **options)
        self.panels = panels

    @property
    def nbytes(self) -> int:
        return self.panels * super().nbytes

    def load(self, atom, view, tiles, slot, position, barrier, share=0):
        row, column = position
        for i in range(self.panels):
            at = row, column + i * self.tile[1]
            super().load(atom, view, tiles, slot * self.panels + i, at, barrier, share)


@dataclass(frozen=True)
class TmaTiles:
    """What a kernel moves by TMA: the ``atom`` and the ``view`` that ``copies`` gave on the host,
    and the ``tiles`` that it allocated in shared memory."""

    copies: Copies
    atom: Any
    view: Any
    tiles: Any

    @property
    def address(self):
        """Of the first tile."""
        return self.tiles.iterator.toint()

    def load(self, slot, position, barrier, share=0) -> None:
        """As that of :class:`Copies`."""
        self.copies.load(self.atom, self.view, self.tiles, slot, position, barrier, share)

    def store(self, slot, position) -> None:
        """As that of :class:`Copies`."""
        self.copies.store(self.atom, self.view, self.tiles, slot, position)

    def prefetch(self, position) -> None:
        """Bring the box whose first element is at ``position`` to the L2 cache; by a thread."""
        _, piece = self.copies.pieces(self.atom, self.view, self.tiles, 0, position, 0)
        cute.prefetch(self.atom, piece)
