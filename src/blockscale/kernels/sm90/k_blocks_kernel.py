# mypy: ignore-errors
"""Lists the K blocks of MXFP4 (``k_blocks``), and lays its scales out in tiles of 128 x 4.

A CTA has 128 rows of B, a warp every so many-th K block. First passes come in the order of K;
others, which few weights need, after all of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute, range_constexpr

from ..common.pdl import pdl_launch_dependents, pdl_wait
from ..common.ptx import load_shared, store_global, store_shared
from ..common.tensor_specs import any_tensor, compile_for
from .k_blocks import HIGHEST, LAST, LEAST_NORMAL, LOWEST, NORMAL, of_pass
from .load_if import load_if
from .upcast_config import B_ROWS, SCALE_BYTES, KBlocksConfig

__all__ = ["ListKBlocks", "compile_config"]

_WARPS = 32
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
        of a group; ``tiles`` (lists, K blocks * 512) and ``entries`` (lists, length)."""
        self.kernel(data, scale, n, tiles, entries).launch(
            grid=(entries.shape[0], 1, 1), block=(32 * _WARPS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, data, scale, n, tiles, entries):
        memory = cutlass.memory.SmemAllocator()
        wide = memory.allocate_array(Int32, _WARPS).toint()
        pdl_wait()
        # a product may come; for what is written here it waits
        pdl_launch_dependents()
        listed, lists = cute.arch.block_idx()[0], cute.ceil_div(n, B_ROWS)
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rows = _Rows(
            data, scale, listed // lists * n, listed % lists * B_ROWS + lane, n, self.whole
        )
        count = Int32(tiles.shape[1]) // SCALE_BYTES
        tile = tiles.iterator.toint() + Int64(listed) * tiles.stride[0]
        line = entries.iterator.toint() + Int64(listed) * entries.stride[0] * 4
        wide_here = Int32(-1)
        scales = rows.scales(warp)
        for k_block in range(warp, count, _WARPS):
            following = rows.scales(k_block + _WARPS)
            store_global(tile + Int64(k_block) * SCALE_BYTES + Int64(lane) * 16, scales, 16)
            highest = rows.highest(scales, k_block)
            entry = of_pass(k_block, highest) | _if(_are_normal(scales, highest), NORMAL)
            if lane == 0:
                entry = entry | _if(k_block == count - 1, LAST)
                store_global(line + Int64(k_block) * 4, [entry], 4)
            wide_here = cutlass.max(wide_here, rows.left(scales, k_block, highest))
            scales = following
        if lane == 0:
            store_shared(wide + warp * 4, [wide_here], 4)
        cute.arch.sync_threads()
        if warp == 0:
            found = Int32(load_shared(wide + lane * 4, 4)[0])
            if cute.arch.vote_any_sync(found >= 0):
                self.list_passes(rows, line, count)

    @cute.jit
    def list_passes(self, rows, line, count):
        """List other passes than the first ones; a warp's work."""
        lane = cute.arch.lane_idx()
        position, entry = count - 1, Int32(0)
        for k_block in range(count):
            scales = rows.scales(k_block)
            first = rows.highest(scales, k_block)
            highest = rows.left(scales, k_block, first)
            while highest >= 0:
                entry, position = of_pass(k_block, highest), position + 1
                if lane == 0:
                    store_global(line + Int64(position) * 4, [entry], 4)
                highest = rows.left(scales, k_block, highest)
            if lane == 0 and k_block == count - 1:
                store_global(line + Int64(k_block) * 4, [of_pass(k_block, first)], 4)
        if lane == 0:
            store_global(line + Int64(position) * 4, [entry | LAST], 4)


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


def compile_config(config: KBlocksConfig):
    """The host function of a kernel, which takes tensors of any shape."""
    return compile_for(
        config.arch,
        ListKBlocks(config),
        any_tensor(cutlass.Uint8, 2, 16, True),
        any_tensor(cutlass.Uint8, 2, 4 if config.whole else 1, config.whole),
        Int32(1),
        any_tensor(cutlass.Uint8, 2, 16, True),
        any_tensor(Int32, 2, 16, True),
    )
