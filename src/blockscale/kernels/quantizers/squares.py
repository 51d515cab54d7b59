# mypy: ignore-errors
"""The largest magnitude of each square of a tile, found before its rows or columns are quantized.

A thread takes 16 columns of a few rows that follow each other; lanes of a warp that share a square
merge what they have, and warps that do so by an atomic maximum in shared memory. Whoever then has a
block of a row, or of a column, takes the maximum of its square for the block's own. Of two scales
of a square the better one is found then, too, and marked in the maximum's sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Uint32, cute, range_constexpr, select_

from ..common import ptx
from ..common.encode import Encoder
from ..common.four_over_six import is_other_better
from ..common.shared import allocate, clear
from .config import PANEL, Config
from .tile import ELEMENTS, STRIP_LANES, load_words

__all__ = ["Squares"]

_OTHER = 0x80000000  # in a maximum: of two scales the second is better


@dataclass(frozen=True)
class Squares:
    """Of ``size`` rows and columns; fp32 bits of their maxima are in shared memory."""

    config: Config
    encoder: Encoder
    size: int
    maxima: Any

    @classmethod
    def of(cls, config: Config, encoder: Encoder, size: int, memory) -> Squares:
        """In ``memory``, set to zero: threads must meet before they are found."""
        assert config.panels == 1  # a tile of squares is 128 columns wide
        nbytes = config.loaded_rows // size * (PANEL // size) * 4
        maxima = allocate(memory, nbytes)
        clear(maxima, nbytes, config.threads)
        return cls(config, encoder, size, maxima)

    @cute.jit
    def find(self, address, encode_scale, table):
        """Of the tile at ``address``. All threads meet in here. Others as ``Encoder.scale``."""
        config, size = self.config, self.size
        thread, itemsize = cute.arch.thread_idx()[0], config.dtype.itemsize
        lane, group = thread % STRIP_LANES, thread // STRIP_LANES
        depth = config.loaded_rows * STRIP_LANES // config.threads  # rows of a thread
        # lanes side by side read from all banks at once so
        order = Uint32(lane << 1 & ELEMENTS - 16 // itemsize)
        words = []
        for i in range_constexpr(depth):
            offset = ((group * depth + i) * PANEL + lane * ELEMENTS) * itemsize
            words += load_words(address + offset, itemsize, order)
        amax = self.encoder.amax(self.encoder.states(words))
        distance, distances = 1, []
        while cutlass.const_expr(distance < 32):
            across = distance < STRIP_LANES
            reach = distance * ELEMENTS if across else distance // STRIP_LANES * depth
            if cutlass.const_expr(reach < size):  # so far away a lane has the same square
                amax = cutlass.max(amax, cute.arch.shuffle_sync_bfly(amax, distance))
                distances.append(distance)
            distance *= 2
        if cutlass.const_expr(config.scaling == "four_over_six"):  # a square lies in one warp
            scales = [self.encoder.scale(amax, each, table) for each in encode_scale]
            magnitudes = self.encoder.magnitudes(words)
            other = is_other_better(self.encoder, magnitudes, scales, tuple(distances))
            amax = amax | Uint32(select_(other, Uint32(_OTHER), Uint32(0)))
        rows = min(32 // STRIP_LANES, size // depth)  # groups that have merged
        if lane * ELEMENTS % size == 0 and group % rows == 0:
            ptx.max_shared(self._place(group * depth, lane * ELEMENTS), amax)
        cute.arch.sync_threads()

    def scale(self, row, column, encode_scale=None, table=None) -> tuple:
        """Of the square that has a place in the tile: fp32 bits of the largest magnitude, and its
        ``Encoder.scale``."""
        amax = ptx.load_shared(self._place(row, column), 4)[0]
        if self.config.scaling == "four_over_six":
            other = amax >= Uint32(_OTHER)
            encode_scale = Float32(select_(other, *reversed(encode_scale)))
            amax = amax & Uint32(_OTHER - 1)
        return amax, *self.encoder.scale(amax, encode_scale, table)

    def _place(self, row, column):
        return self.maxima + (row // self.size * (PANEL // self.size) + column // self.size) * 4
