# mypy: ignore-errors
"""Block scales of B for a warp of ``skinny``: of pairs of rows, one for each 16 of B, those of a
thread's ``part`` of a K block."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute, range_constexpr

from ..common.copies import TmaTiles
from . import ptx
from .skinny_config import SCALE_ROW, Config

__all__ = ["HeldScales", "StagedScales"]


def _own() -> tuple:
    """A thread's row, of eight, and its part of a K block, of four."""
    lane = cute.arch.lane_idx()
    return lane // 4, lane % 4


class StagedScales:
    """Those that TMA brings to each stage, 16 bytes of a row. ``nbytes``: of a thread's part."""

    def __init__(self, config: Config, tiles: TmaTiles, nbytes: int):
        self.config, self.tiles, self.nbytes = config, tiles, nbytes
        row, part = _own()
        self.address = ptx.pin(tiles.address + row * SCALE_ROW + part * nbytes)

    def ask(self, k_block) -> None:
        """Nothing: they come with the stage."""

    def take(self, next_k_block) -> None:
        """Nothing: they are in the stage."""

    def read(self, taken, k_block, slot) -> list:
        """Those of a K block whose stage has come to ``slot``."""
        of_block = k_block * self.config.scale_bytes % SCALE_ROW
        address = self.address + slot * self.tiles.copies.nbytes + of_block
        rows = [(16 * i, 16 * i + 8) for i in range(self.config.mma_tiles[0])]
        read = ptx.ld_shared_bytes
        return [[read(address, r * SCALE_ROW, self.nbytes) for r in pair] for pair in rows]


class HeldScales:
    """Those that a thread reads from ``scale`` itself, of any alignment, while its warp waits for
    the K block before.

    What is outside of ``scale`` is read at its edge. That does no harm: rows after the last are not
    stored, and columns after the last are for zeros, and NaN only where the row has a NaN anyway.
    """

    def __init__(self, config: Config, scale: Any, column: Any, nbytes: int):
        self.config, self.scale, self.column, self.nbytes = config, scale, column, nbytes
        self.words = cute.make_rmem_tensor((2 * config.mma_tiles[0],), Int32)

    @cute.jit
    def ask(self, k_block):
        """For those of a K block."""
        row, part = _own()
        last_row, last = self.scale.shape[0] - 1, self.scale.shape[1] - 1
        first = k_block * self.config.scale_bytes + part * self.nbytes
        for i in range_constexpr(2 * self.config.mma_tiles[0]):
            at, word = cutlass.min(self.column + row + 8 * i, last_row), Int32(0)
            for j in range_constexpr(self.nbytes):
                byte = self.scale[at, cutlass.min(first + j, last)]
                word = word | (Int32(byte) << (8 * j))
            self.words[i] = word

    def take(self, next_k_block) -> list:
        """Those that were asked for last; and ask for those of the next K block."""
        taken = [self.words[i] for i in range(2 * self.config.mma_tiles[0])]
        self.ask(next_k_block)
        return taken

    def read(self, taken, k_block, slot) -> list:
        """Those that were taken, in pairs."""
        return [taken[2 * i : 2 * i + 2] for i in range(self.config.mma_tiles[0])]
