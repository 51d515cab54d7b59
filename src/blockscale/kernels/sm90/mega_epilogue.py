# mypy: ignore-errors
"""Epilogues of both products of a mega MoE on Hopper: SwiGLU of the first one's result is quantized
for the second one, whose result goes to the ranks that the tokens came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int64, Uint32, cute, range_constexpr
from cutlass import max as most
from cutlass import min as least

from ...dtypes import FLOAT32
from ...formats import get_format
from ..common.encode import Encoder
from ..common.ptx import load_shared, store_global, store_shared
from ..common.spec import specify
from ..common.swiglu import PRODUCE
from ..mega.buffers import MULTIPLE, TILE_ROWS, Sizes
from ..mega.peers import Peers
from ..ranks.rows import of_lane
from ..ranks.signals import add_release
from . import ptx
from .epilogue import swizzle_of
from .mega_config import FIRST_CONSUMER, MegaConfig

__all__ = ["MegaEpilogue", "encoder_of", "gated"]

_ROW_BYTES = 128  # of a row that is put together in shared memory
_CHUNK = 16  # bytes that a thread stores at once
_ROWS = 64  # of a warpgroup
_EIGHTS = MULTIPLE // 8  # of columns, of which a thread has two, in two rows


@dataclass(frozen=True)
class MegaEpilogue:
    """A warpgroup's part of tiles. ``staging``: the address of 64 rows of 128 bytes of each in
    shared memory. (Where a thread is, it finds out anew for each tile: accumulators leave few
    registers.)"""

    config: MegaConfig
    peers: Peers
    staging: Any

    @cute.jit
    def __call__(self, acc, tile):
        peers, thread = self.peers, ptx.pin(cute.arch.thread_idx()[0] - FIRST_CONSUMER)
        warpgroup = cute.arch.make_warp_uniform(thread // 128)
        first, thread = thread == 0, thread % 128
        staging = self.staging + warpgroup * (_ROWS * _ROW_BYTES)
        if tile.second == 0:
            if first:  # all that it reads has been loaded
                add_release(peers.signal("up_done", tile.slot), 1, "gpu")
            self.activate(acc, tile, warpgroup, thread, staging)
            cute.arch.sync_warp()
            if thread % 32 == 0:
                add_release(peers.signal("down_full", tile.slot), 1, "gpu")
        else:
            if first:
                add_release(peers.signal("down_done", tile.slot), 1, "gpu")
            self.return_rows(acc, tile, warpgroup, thread, staging)

    # --- the first product ------------------------------------------------------------------------

    @cute.jit
    def activate(self, acc, tile, warpgroup, thread, staging):
        """SwiGLU of gates and up, quantized to the second ring: elements by way of shared memory,
        and a scale for each row."""
        sizes = self.config.sizes
        encoder = encoder_of(sizes)
        row, lane = thread // 32 * 16 + thread % 32 // 4, thread % 4
        for half in range_constexpr(2):
            values = self.swiglu(acc, half)
            amax = encoder.amax(encoder.states(values))
            for apart in (1, 2):
                amax = most(amax, cute.arch.shuffle_sync_bfly(amax, apart))
            code, reciprocal = encoder.scale(amax)
            own = row + 8 * half
            for eight in range_constexpr(0, _EIGHTS, 2):
                # two of its eight columns, and two of the next eight
                some = values[2 * eight : 2 * eight + 4]
                word = encoder.elements(some, [amax] * 4, [reciprocal] * 4)[0]
                chunk = (eight // 2) ^ own % 8
                address = staging + own * _ROW_BYTES + chunk * _CHUNK + lane * 2
                store_shared(address, [word & Uint32(0xFFFF)], 2)
                store_shared(address + 8, [word >> Uint32(16)], 2)
            if lane == 0:
                words = sizes.scale_words(sizes.intermediate)
                index = tile.slot * words + tile.column // MULTIPLE
                place = self.peers.address("down_ring_scale") + Int64(index) * (4 * TILE_ROWS)
                store_global(place + (warpgroup * _ROWS + own) * 4, [code], 4)
        cute.arch.sync_warp()  # a warp has 16 rows of its own
        line = self.peers.address("down_ring") + Int64(
            tile.a_row + warpgroup * _ROWS
        ) * sizes.row_bytes(sizes.intermediate)
        for part in range_constexpr(4):
            own = thread // 32 * 16 + part * 4 + thread % 32 // 8
            chunk = thread % 8
            source = staging + own * _ROW_BYTES + (chunk ^ own % 8) * _CHUNK
            target = line + Int64(own) * sizes.row_bytes(sizes.intermediate) + tile.column
            store_global(target + chunk * _CHUNK, load_shared(source, _CHUNK), _CHUNK)
        cute.arch.sync_warp()

    def swiglu(self, acc, half: int) -> list:
        """fp32 bits of a thread's values in one of its two rows."""
        made = []
        for eight in range(_EIGHTS):
            where = range(4 * eight + 2 * half, 4 * eight + 2 * half + 2)
            made += gated(*([each[i] for i in where] for each in acc))
        return made

    # --- the second product -----------------------------------------------------------------------

    @cute.jit
    def return_rows(self, acc, tile, warpgroup, thread, staging):
        """Rows to where their ranks add them up, 64 columns at a time."""
        peers, sizes, lane = self.peers, self.peers.sizes, cute.arch.lane_idx()
        warp = thread // 32
        rows = tile.rows - (warpgroup * _ROWS + warp * 16)  # of the warp's 16
        if rows > 0:
            row = tile.first + warpgroup * _ROWS + warp * 16 + least(lane % 16, rows - 1)
            origin = peers.word("origins", row)
            start = Int64(origin % sizes.pairs) * sizes.hidden + tile.column
            address = peers.of_peer(origin // sizes.pairs, "results") + start * 2
            base = staging + warp * 16 * _ROW_BYTES
            for box in range_constexpr(2 * MULTIPLE // 64):
                self.put(acc, base, box * 64, lane)
                cute.arch.sync_warp()
                for part in range_constexpr(4):
                    other, chunk = part * 4 + lane // 8, lane % 8
                    words = load_shared(
                        base + other * _ROW_BYTES + (chunk ^ other % 8) * _CHUNK, _CHUNK
                    )
                    there = of_lane(address, other) + box * 128 + chunk * _CHUNK
                    column = tile.column + box * 64 + chunk * 8
                    if other < rows and column < sizes.hidden:
                        store_global(there, words, _CHUNK)
                cute.arch.sync_warp()

    def put(self, acc, base, column: int, lane) -> None:
        """Put 64 columns of a warp's 16 rows into shared memory, in bfloat16, swizzled."""
        row = lane % 16
        for group in range(0, 8, 2):
            chunk, words = (group + lane // 16) ^ swizzle_of(row, _ROW_BYTES), []
            for j in (0, 1):
                mma, first = self.config.product.place(0, column + 8 * (group + j))
                values = [acc[mma][first + i] for i in range(4)]
                words += [ptx.cvt_rn_x2(*values[i : i + 2], "bf16") for i in (0, 2)]
            ptx.stmatrix(base + row * _ROW_BYTES + chunk * _CHUNK, words)


def encoder_of(sizes: Sizes) -> Encoder:
    """Of what the second product reads."""
    format = get_format(sizes.activations)
    spec = specify(format, format.default_scale_rounding, "propagate")
    return Encoder(spec, "e4m3", FLOAT32, False)


def gated(gates: list, up: list) -> list:
    """SwiGLU of two values of each, as fp32 bits; rounded to bfloat16 as the product and SwiGLU of
    it would be where they are stored."""
    made = PRODUCE["swiglu"]([_rounded(gates), _rounded(up)], FLOAT32, False)[0][0]
    return _rounded([word.bitcast(Float32) for word in made])


def _rounded(values: list) -> list:
    """fp32 bits of two values, rounded to bfloat16."""
    word = Uint32(ptx.cvt_rn_x2(*values, "bf16"))
    return [word << Uint32(16), word & Uint32(0xFFFF0000)]
