"""How a product's output leaves its warpgroups: what the configurations of all kernels share."""

from __future__ import annotations

import torch

from ..common import machine

__all__ = ["BOX", "MULTIPROCESSORS", "ROWS", "Stored"]

ROWS = 64  # of one wgmma
BOX = 128  # bytes of a row of the output that one instruction stores
MULTIPROCESSORS = machine.MULTIPROCESSORS["sm_90a"]


class Stored:
    """Derived from the fields of a configuration that are named here."""

    __slots__ = ()

    out_dtype: torch.dtype
    accumulate: bool
    tile: tuple[int, int]
    warpgroups: int
    c_buffers: int
    tma_store: bool

    @property
    def row_warpgroups(self) -> int:
        """That share the rows of a tile, and store them."""
        return self.warpgroups

    @property
    def row_steps(self) -> int:
        """wgmmas that a warpgroup needs to go down its rows."""
        return self.tile[0] // (ROWS * self.row_warpgroups)

    @property
    def reduces(self) -> bool:
        """Whether what the output holds is added where it is, by TMA, which does so in its type."""
        return self.accumulate and self.tma_store and self.out_dtype == torch.float32

    @property
    def box_columns(self) -> int:
        return BOX // self.out_dtype.itemsize

    @property
    def boxes(self) -> int:
        """Of a warpgroup's output."""
        return self.row_steps * self.tile[1] // self.box_columns

    @property
    def output_bytes(self) -> int:
        """Room in shared memory to put the output together."""
        return self.row_warpgroups * self.c_buffers * ROWS * BOX if self.tma_store else 0
