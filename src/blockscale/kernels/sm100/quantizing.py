# mypy: ignore-errors
"""Accumulators from Tensor Memory to the operand of the next product: elements, and tiles of their
block scales.

A thread has a row, and takes 32 columns of it at a time, which are whole blocks: it needs nothing
from other threads. With SwiGLU half of a tile's columns are gates, the other half as many of up, so
that a thread has both. The loader brings rows of B from two places for it, which costs nothing (one
CTA of a pair loads gates, the other one up); rows of a weight need not be interleaved, and the same
weight serves a product that is not fused. Values are not rounded before they are quantized: the
bytes are those of ``swiglu_quantize``, or ``quantize``, of an fp32 product.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, select_

from ...dtypes import FLOAT32
from ..common.encode import Encoder
from ..common.ptx import store_global, store_shared
from ..common.swiglu import PRODUCE
from . import ptx
from .config import EPILOGUE_WARPS
from .epilogue import Epilogue
from .quantizing_config import STORE_COLUMNS, SUBTILE_N

__all__ = ["QuantizingEpilogue"]

_FP32 = FLOAT32
_SWIGLU_COLUMNS = 8  # columns of which SwiGLU is computed at once; more take more registers


class QuantizingEpilogue(Epilogue):
    """Quantizes all tiles, and stores them.

    ``output`` has data (M, bytes), block scales and a global scale or None in place of ``d``.
    ``table`` is the address in shared memory of reciprocals of block scales, where there is a
    global scale.
    """

    def __init__(self, pipeline, store_tiles, output, table):
        (data, self.scales, self.global_scale), *rest = output
        super().__init__(pipeline, store_tiles, (data, *rest))
        self.quantizing, self.table = self.config.quantizing, table
        element = self.quantizing.stored.element.name.lower()
        self.encoder = Encoder(self.quantizing.spec, element, _FP32, True)
        self.encode_scale = None

    def begin(self) -> None:
        if self.encoder.has_table:
            threads = 32 * EPILOGUE_WARPS
            self.encode_scale = self.encoder.prepare(self.global_scale, self.table, threads)
            cute.arch.barrier(barrier_id=1, number_of_threads=threads)

    @cute.jit
    def store_acc(self, acc, which, free, warp, tile):
        """Quantize an accumulator, 32 columns after the other, and store what is complete.

        A row of a tile of scales has those of four blocks, a byte each.
        """
        config, quantizing = self.config, self.quantizing
        steps, tile_steps = STORE_COLUMNS // SUBTILE_N, 4 // quantizing.subtile_scales
        word = Uint32(0)
        for i in cutlass.range(config.subtiles, unroll=1):
            subtile = self.order(i, which)
            first, step = tile.column + subtile * SUBTILE_N, subtile % steps
            address = acc + subtile * SUBTILE_N
            found = ptx.tcgen05_ld(address, SUBTILE_N, config.b_halves, config.tile[1])
            if i + 1 == config.early_release:
                self.release(free)
            codes, scales = self.quantize(self.values(found, first, tile))
            if const_expr(tile.end is None):
                self.store_codes(codes, i, warp, tile, first)
            else:
                if tile.row + warp * 32 + 32 <= tile.end:
                    self.store_codes(codes, i, warp, tile, first)
                else:
                    self.store_rows_of_codes(codes, warp, tile, first)
            scales = select_(first < self.pipeline.extent[1], scales, Uint32(0))
            word = select_(i % tile_steps == 0, Uint32(0), word)
            shift = step % tile_steps * (32 // tile_steps)
            word = word | scales << Uint32(shift)
            if i % tile_steps == tile_steps - 1:
                self.store_scales(word, warp, tile, first)

    def values(self, acc: list, column, tile) -> list:
        """The fp32 bits of what is quantized, from ``column`` of the output on."""
        (_, bias, alpha), halves = self.output, []
        for half in range(self.quantizing.b_halves):
            where = column + half * self.pipeline.extent[1] if half else column
            some = self.scale(acc[half * SUBTILE_N :][:SUBTILE_N], bias, alpha, where, tile.group)
            if tile.end is not None:  # there is no product of no K blocks
                some = [Float32(select_(tile.k_blocks > 0, each, Float32(0))) for each in some]
            halves.append(self.rounded([value.bitcast(Uint32) for value in some]))
        if not self.quantizing.swiglu:
            return halves[0]
        made = []
        for j in range(0, SUBTILE_N, _SWIGLU_COLUMNS):
            some = [half[j : j + _SWIGLU_COLUMNS] for half in halves]
            made += PRODUCE["swiglu"](some, _FP32, True)[0][0]
        return self.rounded(made)

    def rounded(self, values: list) -> list:
        """fp32 bits, as if they had been stored in bfloat16, if they are to be."""
        if not self.quantizing.rounded:
            return values
        floats, found = [value.bitcast(Float32) for value in values], []
        for pair in zip(floats[::2], floats[1::2], strict=True):
            found += ptx.widen(ptx.cvt_rn_x2(*pair, "bf16"), "bf16")
        return [value.bitcast(Uint32) for value in found]

    def quantize(self, values: list) -> tuple:
        """The elements, and the scales of their blocks in a word."""
        size, codes, scales = self.quantizing.stored.block[1], [], Uint32(0)
        for block in range(self.quantizing.subtile_scales):
            held = values[block * size : (block + 1) * size]
            amax = self.encoder.amax(self.encoder.states(held))
            code, reciprocal = self.encoder.scale(amax, self.encode_scale, self.table)
            codes += self.encoder.elements(held, [amax] * size, [reciprocal] * size)
            scales = scales | code << Uint32(block * 8)
        return codes, scales

    @cute.jit
    def store_codes(self, codes: list, i, warp, tile, first):
        """Put the ``i``-th subtile, from column ``first`` on, where TMA stores it; and store what
        is complete."""
        steps = STORE_COLUMNS // SUBTILE_N
        if i % steps == 0:
            self.acquire()
        stage = self.stage(i // steps, warp)
        self.put(codes, self.line(stage), first // SUBTILE_N % steps)
        if i % steps == steps - 1:
            column = first // STORE_COLUMNS * self.quantizing.store_row_bytes
            self.store_stage(stage, tile.row + warp * 32, column)

    def store_rows_of_codes(self, codes: list, warp, tile, first) -> None:
        """Store those of rows that are the tile's own, 16 bytes at a time."""
        data, row = self.output[0], tile.row + warp * 32 + cute.arch.lane_idx()
        column = first // STORE_COLUMNS * self.quantizing.store_row_bytes
        column = column + first % STORE_COLUMNS * self.quantizing.stored.element.bits // 8
        inside = Int32(row < tile.end) & Int32(first < self.pipeline.extent[1])
        address = data.iterator.toint() + data.layout((row, column))
        for i in range(0, len(codes), 4):
            words = [code.bitcast(Int32) for code in codes[i : i + 4]]
            ptx.st_global_v4(address + 4 * i, words, inside)

    def put(self, codes: list, line, step) -> None:
        """Put a thread's elements into its line of shared memory, swizzled."""
        lane, width, chunks = cute.arch.lane_idx(), self.quantizing.store_row_bytes, len(codes) // 4
        swizzle = lane * width // 128 % (width // 16)
        for chunk in range(chunks):
            place = (step * chunks + chunk) ^ swizzle
            store_shared(line + place * 16, codes[4 * chunk : 4 * chunk + 4], 16)

    @cute.jit
    def store_scales(self, word, warp, tile, column):
        """Store four scales of a thread's row: zeros in a tile's rows below the last one of the
        output, or of its group; nothing of rows of no group."""
        rows, columns = self.pipeline.extent
        if const_expr(tile.end is not None):
            rows = select_(tile.k_blocks > 0, tile.end, Int32(0))
        word = select_(tile.row + warp * 32 + cute.arch.lane_idx() < rows, word, Uint32(0))
        width = 4 * self.quantizing.stored.block[1]  # columns of the output in a tile of scales
        index = tile.scale_starts[0] * cute.ceil_div(columns, width) + column // width
        if tile.row < rows and column // width * width < columns:
            start = self.scales.iterator.toint() + Int64(index) * 512
            place = cute.arch.lane_idx() * 16 + warp * 4
            store_global(start + place, [word], 4)
