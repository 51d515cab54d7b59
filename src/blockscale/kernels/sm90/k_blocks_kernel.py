# mypy: ignore-errors
"""Lists the K blocks of MXFP4 (``k_blocks``), and lays its scales out in tiles of 128 x 4.

A CTA has a part of a list, 128 rows of B and 32 K blocks, a warp for each. First passes come in the
order of K; others, which few weights need, after them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute, range_constexpr

from ..common.pdl import pdl_launch_dependents, pdl_wait
from ..common.ptx import load_shared, store_global, store_shared
from ..common.tensor_specs import HostFunction, any_tensor
from .k_blocks import END, HIGHEST, LAST, LEAST_NORMAL, LOWEST, NORMAL, of_pass
from .load_if import load_if
from .upcast_config import B_ROWS, PART, PASSES, SCALE_WORDS, KBlocksConfig

__all__ = ["ListKBlocks", "host_function"]

_NAN = 255
_LARGE = 127 + 64  # of zeros it could be, and overflow
_SPAN = HIGHEST - LOWEST  # of a pass


class ListKBlocks:
    """The kernel of a :class:`KBlocksConfig` and the host code that launches it."""

    def __init__(self, config: KBlocksConfig):
        self.whole = config.whole

    @cute.jit
    def __call__(self, data, scale, n, tiles, entries, stream):
        """Launch. ``data`` (groups * N, K / 2) and ``scale`` (groups * N, K / 32) bytes, ``n`` rows
        of a group; ``tiles`` (lists, K blocks * 128) and ``entries`` (lists, length), words."""
        count = Int32(tiles.shape[1]) // SCALE_WORDS
        self.kernel(data, scale, n, tiles, entries, count).launch(
            grid=(entries.shape[0], cute.ceil_div(count, PART), 1),
            block=(32 * PART, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, data, scale, n, tiles, entries, count):
        memory = cutlass.memory.SmemAllocator()
        wide = memory.allocate_array(Int32, PART).toint()
        pdl_wait()
        # a product may come; for what is written here it waits
        pdl_launch_dependents()
        listed, lists = cute.arch.block_idx()[0], cute.ceil_div(n, B_ROWS)
        first = cute.arch.block_idx()[1] * PART
        here = cutlass.min(count - first, Int32(PART))
        end = END | _if(first + here == count, LAST)
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        row = listed % lists * B_ROWS + lane
        rows = _Rows(data, scale, listed // lists * n, row, n, self.whole)
        line = entries.iterator.toint() + Int64(listed) * entries.stride[0] * 4
        line = line + Int64(first) * (PASSES * 4)
        left = Int32(-1)
        if warp < here:
            k_block = first + warp
            scales = rows.scales(k_block)
            tile = tiles.iterator.toint() + Int64(listed) * tiles.stride[0] * 4
            tile = tile + Int64(k_block) * (SCALE_WORDS * 4)
            store_global(tile + Int64(lane) * 16, scales, 16)
            highest = rows.highest(scales, k_block)
            entry = of_pass(k_block, highest) | _if(_are_normal(scales, highest), NORMAL)
            entry = entry | _if(warp == here - 1, end)
            if lane == 0:
                store_global(line + Int64(warp) * 4, [entry], 4)
            left = rows.left(scales, k_block, highest)
        if lane == 0:
            store_shared(wide + warp * 4, [left], 4)
        cute.arch.sync_threads()
        if warp == 0:
            found = Int32(load_shared(wide + lane * 4, 4)[0])
            if cute.arch.vote_any_sync(found >= 0):
                self.list_passes(rows, line, first, here, end)

    @cute.jit
    def list_passes(self, rows, line, first, here, end):
        """List other passes than the first ones; a warp's work."""
        lane = cute.arch.lane_idx()
        position, entry = here - 1, Int32(0)
        for k_block in range(first, first + here):
            scales = rows.scales(k_block)
            highest = rows.highest(scales, k_block)
            if lane == 0 and k_block == first + here - 1:  # it is not the end any more
                store_global(line + Int64(here - 1) * 4, [of_pass(k_block, highest)], 4)
            highest = rows.left(scales, k_block, highest)
            while highest >= 0:
                entry, position = of_pass(k_block, highest), position + 1
                if lane == 0:
                    store_global(line + Int64(position) * 4, [entry], 4)
                highest = rows.left(scales, k_block, highest)
        if lane == 0:
            store_global(line + Int64(position) * 4, [entry | end], 4)


@dataclass(frozen=True)
class _Rows:
    """Four rows of B of a lane, ``row`` and every 32nd after that, of ``n`` from ``begin`` on."""

    data: Any
    scale: Any
    begin: Any
    row: Any
    n: Any
    whole: bool

    def places(self) -> list:
        """Of each row: where it is, and whether it is there."""
        rows = [self.row + 32 * i for i in range(B_ROWS // 32)]
        return [(self.begin + row, Int32(row < self.n)) for row in rows]

    def scales(self, k_block) -> list:
        """Four of a K block of each row, in a word; zeros where there are none, beyond K too."""
        words, blocks = [], Int32(self.scale.shape[1])
        for row, here in self.places():
            line = self.scale.iterator.toint() + Int64(row) * self.scale.stride[0]
            line = line + Int64(k_block) * 4
            if self.whole:
                words += load_if(line, 0, 4, here & Int32(4 * k_block < blocks))
                continue
            word = Int32(0)
            for i in range(4):
                wanted = here & Int32(4 * k_block + i < blocks)
                word = word | load_if(line, i, 1, wanted)[0] << 8 * i
            words.append(word)
        return words

    @cute.jit
    def highest(self, scales: list, k_block):
        """The highest exponent, 0 where there is none; by a warp."""
        found = Int32(0)
        for word in scales:
            for i in range(4):
                own = _scale(word, i)
                found = cutlass.max(found, Int32(cutlass.select_(own == _NAN, Int32(0), own)))
        found = cute.arch.warp_redux_sync(found, "max")
        if found > _LARGE:
            found = cutlass.max(self.highest_of(scales, k_block, Int32(_NAN)), Int32(0))
        return found

    @cute.jit
    def left(self, scales: list, k_block, highest):
        """The highest exponent of those that a pass has as zeros and are not, or -1; ``highest``:
        of the pass; by a warp."""
        low = Int32(0)
        for i in range_constexpr(len(scales)):
            for j in range_constexpr(4):
                low = low | Int32(_scale(scales[i], j) < highest - _SPAN)
        found = Int32(-1)
        if cute.arch.vote_any_sync(low != 0):
            found = self.highest_of(scales, k_block, highest - _SPAN)
        return found

    @cute.jit
    def highest_of(self, scales: list, k_block, limit):
        """The highest exponent below ``limit`` of 32 elements not all of which are zero, or -1."""
        found, blocks = Int32(-1), Int32(self.scale.shape[1])
        for i in range(4):
            here = Int32(4 * k_block + i < blocks)
            for (row, there), word in zip(self.places(), scales, strict=True):
                line = self.data.iterator.toint() + Int64(row) * self.data.stride[0]
                own = _scale(word, i)
                asked = here & there & Int32(own < limit)
                octets = load_if(line + Int64(4 * k_block + i) * 16, 0, 16, asked)
                bits = (octets[0] | octets[1] | octets[2] | octets[3]) & 0x77777777
                found = cutlass.max(found, Int32(cutlass.select_(bits != 0, own, Int32(-1))))
        return cute.arch.warp_redux_sync(found, "max")


def _are_normal(scales: list, highest):
    """Whether all of a K block are exact as normal numbers of E4M3; by a warp."""
    far = Int32(0)
    for word in scales:
        for i in range(4):
            below = highest - _scale(word, i)  # negative of NaN
            far = far | below | (HIGHEST - LEAST_NORMAL - below)
    return cute.arch.vote_all_sync(far >= 0)


def _scale(word, i):
    return word >> 8 * i & 0xFF


def _if(condition, value: int):
    return Int32(cutlass.select_(condition, Int32(value), Int32(0)))


def host_function(config: KBlocksConfig):
    """The host function of a kernel, which takes tensors of any shape."""
    return HostFunction(
        config.arch,
        ListKBlocks(config),
        any_tensor(cutlass.Uint8, 2, 16, True),
        any_tensor(cutlass.Uint8, 2, 4 if config.whole else 1, config.whole),
        Int32(1),
        any_tensor(Int32, 2, 16, True),
        any_tensor(Int32, 2, 16, True),
    )
