# mypy: ignore-errors
"""Epilogues of a mega MoE by matrices of four bits, whose accumulators are those of the results
transposed: a thread has two rows of each eight, in one column of gates and of up, or in two columns
of results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, Int64, Uint32, const_expr, cute, range_constexpr
from cutlass import max as most

from ..common.factor import factor_of
from ..common.ptx import load_shared, max_u16x2, store_global, store_shared
from ..mega.buffers import MULTIPLE, TILE_ROWS
from ..mega.peers import Peers
from ..ranks.signals import add_release
from . import ptx
from .mega_config import FIRST_CONSUMER, MixedMegaConfig
from .mega_epilogue import encoder_of, gated
from .mixed_epilogue import put_rows

__all__ = ["MegaMixedEpilogue", "widened_e4m3"]

_CHUNK = 16  # bytes that a thread stores at once
_ALL_BARRIER, _WARPGROUP_BARRIER = 4, 5  # of all that multiply, and of each warpgroup


@dataclass(frozen=True)
class MegaMixedEpilogue:
    """What threads that multiply do with a tile. ``staging``: the address of
    ``MixedMegaConfig.staging_bytes``; ``alphas`` of both products, or None."""

    config: MixedMegaConfig
    peers: Peers
    staging: Any
    alphas: Any

    @cute.jit
    def __call__(self, acc, tile):
        peers, thread = self.peers, ptx.pin(cute.arch.thread_idx()[0] - FIRST_CONSUMER)
        if tile.second == 0:
            if thread == 0:  # all that it reads has been loaded
                add_release(peers.signal("up_done", tile.slot), 1, "gpu")
            self.scale(acc, 0, tile)
            self.activate(acc, tile, thread)
            cute.arch.sync_warp()
            if thread % 32 == 0:
                add_release(peers.signal("down_full", tile.slot), 1, "gpu")
        else:
            if thread == 0:
                add_release(peers.signal("down_done", tile.slot), 1, "gpu")
            self.scale(acc, 1, tile)
            self.return_rows(acc, tile, thread)

    @cute.jit
    def scale(self, acc, product: int, tile):
        """Multiply by what widened elements lack, and by global scales."""
        gain = self.config.product.gain
        factor = None
        if const_expr(self.alphas is not None):
            factor = factor_of(self.alphas[product], tile.group)
        for i in range_constexpr(self.config.unit_rows // 2):
            value = acc[i]
            if const_expr(gain != 1):
                value = value * gain
            if const_expr(factor is not None):
                value = value * factor
            acc[i] = value

    # --- the first product ------------------------------------------------------------------------

    @cute.jit
    def activate(self, acc, tile, thread):
        """SwiGLU of gates and up, quantized to the second ring: a scale for each row, of what all
        warps have of it, and elements by way of shared memory."""
        config, sizes = self.config, self.config.sizes
        encoder, groups = encoder_of(sizes), config.unit_rows // 8
        warp, lane = thread // 32, thread % 32
        fours = [[acc[4 * i + j] for j in range(4)] for i in range(groups)]
        pairs = [gated(four[:2], four[2:]) for four in fours]
        self.quantize_rows(encoder, pairs, tile, thread)
        found = [load_shared(self.scale_address(8 * i + lane % 4 * 2), 16) for i in range(groups)]
        amaxes, inverses = ([each[j::2] for each in found] for j in (0, 1))
        # column 8 * warp + lane // 4 of 128 seen as (4, 2, 2, 4, 2), whose first place goes behind
        # the fourth one
        octet = warp // 2 % 2 * 8 + warp % 2 * 4 + lane // 8
        within = warp // 4 * 4 + lane // 4 % 2 * 2
        for i in range_constexpr(0, groups, 2):
            values = pairs[i] + pairs[i + 1]
            both = amaxes[i] + amaxes[i + 1], inverses[i] + inverses[i + 1]
            word = encoder.elements(values, *both)[0]
            for j, pair in enumerate(widened_e4m3(word)):
                for k in range_constexpr(2):
                    row = 8 * (i + j) + lane % 4 * 2 + k
                    address = self.staging_address(row, octet) + within
                    half = pair >> Uint32(16) if k else pair & Uint32(0xFFFF)
                    store_shared(address, [half], 2)
        self.sync()
        line = self.peers.address("down_ring") + Int64(tile.a_row) * (2 * sizes.intermediate)
        chunks = 2 * MULTIPLE // _CHUNK
        for first in range_constexpr(0, config.unit_rows * chunks, 128 * config.consumers):
            item = first + thread
            row, chunk = item // chunks, item % chunks
            words = load_shared(self.staging_address(row, chunk), _CHUNK)
            there = line + Int64(row) * (2 * sizes.intermediate) + tile.column * 2
            store_global(there + chunk * _CHUNK, words, _CHUNK)

    def staging_address(self, row, chunk):
        """Where 16 bytes of a row are put together: in banks that few others have."""
        return self.staging + row * (2 * MULTIPLE) + (chunk ^ row // 2 % 2 * 4) * _CHUNK

    @cute.jit
    def quantize_rows(self, encoder, pairs, tile, thread):
        """The scale of each row, of what all threads have of it: to the second ring, and with the
        largest magnitude in shared memory."""
        config, sizes = self.config, self.config.sizes
        warp, lane = thread // 32, thread % 32
        for i in range_constexpr(len(pairs)):
            for k in range_constexpr(2):
                place = self.amax_address(8 * i + lane % 4 * 2 + k, warp) + lane // 4 * 2
                store_shared(place, [pairs[i][k] >> Uint32(16) & Uint32(0x7FFF)], 2)
        self.sync()
        chunks = 2 * MULTIPLE // _CHUNK
        words = sizes.scale_words(sizes.intermediate)
        index = tile.a_row // TILE_ROWS * words + tile.column // MULTIPLE
        line = self.peers.address("down_ring_scale") + Int64(index) * (4 * TILE_ROWS)
        for first in range_constexpr(0, config.unit_rows * chunks, 128 * config.consumers):
            row, chunk = (first + thread) // chunks, thread % chunks
            some = load_shared(self.amax_address(row, chunk), _CHUNK)
            both = max_u16x2(max_u16x2(some[0], some[1]), max_u16x2(some[2], some[3]))
            amax = most(both & Uint32(0xFFFF), both >> Uint32(16))
            for apart in (1, 2, 4, 8):
                amax = most(amax, cute.arch.shuffle_sync_bfly(amax, apart))
            amax = amax << Uint32(16)
            code, inverse = encoder.scale(amax)
            if chunk == 0:
                store_shared(self.scale_address(row), [amax, inverse], 8)
                store_global(line + (tile.a_row % TILE_ROWS + row) * 4, [code], 4)
        self.sync()

    def amax_address(self, row, chunk):
        """Where those of eight columns of a row are, two bytes each."""
        table = self.staging + self.config.activated_bytes
        return table + row * (2 * MULTIPLE) + (chunk ^ row // 2 % 4) * _CHUNK

    def scale_address(self, row):
        """Where a row's amax is, and the reciprocal of its scale."""
        table = self.staging + self.config.activated_bytes + self.config.unit_rows * 2 * MULTIPLE
        return table + row * 8

    def sync(self) -> None:
        threads = 128 * self.config.consumers
        cute.arch.barrier(barrier_id=_ALL_BARRIER, number_of_threads=threads)

    # --- the second product -----------------------------------------------------------------------

    @cute.jit
    def return_rows(self, acc, tile, thread):
        """Rows to where their ranks add them up, a warpgroup's 64 columns of each."""
        peers, sizes, rows = self.peers, self.peers.sizes, self.config.unit_rows
        warpgroup = cute.arch.make_warp_uniform(thread // 128)
        thread = thread % 128
        staging = self.staging + self.config.activated_bytes + self.config.amax_bytes
        staging = staging + warpgroup * (rows * 128)
        self.sync_warpgroup(warpgroup)  # what the last tile put there has been read
        put_rows(acc, 0, rows, staging, thread, "bf16")
        self.sync_warpgroup(warpgroup)
        chunk = thread % 8
        column = tile.column + warpgroup * 64 + chunk * 8
        for first in range_constexpr(0, rows, 16):
            row = first + thread // 8
            if row < tile.rows and column < sizes.hidden:
                origin = peers.word("origins", tile.first + row)
                start = Int64(origin % sizes.pairs) * sizes.hidden + column
                words = load_shared(staging + row * 128 + (chunk ^ row % 8) * _CHUNK, _CHUNK)
                address = peers.of_peer(origin // sizes.pairs, "results") + start * 2
                store_global(address, words, _CHUNK)

    def sync_warpgroup(self, warpgroup) -> None:
        cute.arch.barrier(barrier_id=_WARPGROUP_BARRIER + warpgroup, number_of_threads=128)


def widened_e4m3(word) -> list:
    """The four elements of a word, in two words of bf16."""
    code = (
        "{ .reg .b16 a, b, c, d, e; .reg .b32 x; .reg .f32 f, g; mov.b32 {a, b}, $2;"
        " cvt.rn.f16x2.e4m3x2 x, a; mov.b32 {c, d}, x; cvt.f32.f16 f, c; cvt.f32.f16 g, d;"
        " cvt.rn.bf16x2.f32 $0, g, f;"
        " cvt.rn.f16x2.e4m3x2 x, b; mov.b32 {c, d}, x; cvt.f32.f16 f, c; cvt.f32.f16 g, d;"
        " cvt.rn.bf16x2.f32 $1, g, f; }"
    )
    return [Uint32(each) for each in ptx._asm(code, [Int32] * 2, [word], ["r"])]
