# mypy: ignore-errors
"""Sums from Tensor Memory to what the next product reads: elements, and tiles of their scales.

A thread has a row, and takes 32 columns of it at a time, which are whole blocks: nothing is asked
of others. With SwiGLU half of a tile's columns are gates, the other half as many of up, so that
both meet in a thread. The loader brings rows of B from two places for it, which costs nothing (of
two blocks that work together one loads gates, the other up); rows of a weight need not be
interleaved, and the same weight serves a product that is not fused. Values are not rounded before
they are quantized: the bytes are those of ``swiglu_quantize``, or ``quantize``, of an fp32 product.
"""

from __future__ import annotations

import cutlass
from cutlass import Int64, Uint32, cute, select_

from ...dtypes import FLOAT32
from ..common.encode import Encoder
from ..common.ptx import store_global, store_shared
from ..common.swiglu import PRODUCE
from . import ptx
from .config import WARPS
from .epilogue import Epilogue
from .quantizing_config import BOX_COLUMNS, STEP

__all__ = ["QuantizingEpilogue"]

_FP32 = FLOAT32
_AT_ONCE = 8  # values of which SwiGLU is computed; more would take more registers


class QuantizingEpilogue(Epilogue):
    """``output``: data (M, bytes), scales and a global scale or None, in place of ``d``.
    ``table``: address in shared memory of reciprocals of scales, where there is a global one."""

    def __init__(self, pipeline, copies, out, atom, view, output, table):
        (data, self.scales, self.global_scale), *rest = output
        super().__init__(pipeline, copies, out, atom, view, (data, *rest))
        self.quantizing, self.table = self.config.quantizing, table
        element = self.quantizing.stored.element.name.lower()
        self.encoder = Encoder(self.quantizing.spec, element, _FP32, True)
        self.encode_scale = None

    def begin(self) -> None:
        if self.encoder.has_table:
            threads = 32 * WARPS
            self.encode_scale = self.encoder.prepare(self.global_scale, self.table, threads)
            cute.arch.barrier(barrier_id=1, number_of_threads=threads)

    @cute.jit
    def take(self, sums, which, free, warp, row, column):
        """Quantize a tile, 32 columns after the other, and store what is complete with them.

        Four blocks' scales are the bytes of a row in a tile of scales.
        """
        config, width = self.config, self.quantizing.box_bytes
        steps, tile_steps = BOX_COLUMNS // STEP, 4 // self.quantizing.step_scales
        word = Uint32(0)
        for i in cutlass.range(config.boxes, unroll=1):
            box = self.order(i, which)
            first, step = column + box * STEP, box % steps
            found = ptx.load_sums(sums + box * STEP, STEP, config.parts_of_columns, config.tile[1])
            if i + 1 == config.early_boxes:
                self.release(free)
            if i % steps == 0:
                self.wait_for_slot()
            slot = self.slot(i // steps, warp)
            codes, scales = self.quantize(self.values(found, first))
            self.put(codes, self.line(slot), step)
            scales = select_(first < self.pipeline.extent[1], scales, Uint32(0))
            word = select_(i % tile_steps == 0, Uint32(0), word)
            shift = step % tile_steps * (32 // tile_steps)
            word = word | scales << Uint32(shift)
            if i % tile_steps == tile_steps - 1:
                self.store_scales(word, warp, row, first)
            if i % steps == steps - 1:
                self.store_slot(slot, row, first // BOX_COLUMNS * width)

    def values(self, sums: list, column) -> list:
        """fp32 bits of what is quantized, from ``column`` of the output on."""
        (_, bias, alpha), parts = self.output, []
        for part in range(self.quantizing.parts):
            where = column + part * self.pipeline.extent[1] if part else column
            some = self.scale(sums[part * STEP :][:STEP], bias, alpha, where)
            parts.append([value.bitcast(Uint32) for value in some])
        if not self.quantizing.swiglu:
            return parts[0]
        made = []
        for j in range(0, STEP, _AT_ONCE):
            some = [part[j : j + _AT_ONCE] for part in parts]
            made += PRODUCE["swiglu"](some, _FP32, True)[0]
        return made

    def quantize(self, values: list) -> tuple:
        """Elements, and the scales of their blocks in a word."""
        size, codes, scales = self.quantizing.stored.block[1], [], Uint32(0)
        for block in range(self.quantizing.step_scales):
            held = values[block * size : (block + 1) * size]
            amax = self.encoder.amax(self.encoder.states(held))
            code, reciprocal = self.encoder.scale(amax, self.encode_scale, self.table)
            codes += self.encoder.elements(held, [amax] * size, [reciprocal] * size)
            scales = scales | code << Uint32(block * 8)
        return codes, scales

    def put(self, codes: list, line, step) -> None:
        """Put a thread's elements into its line of shared memory, swizzled."""
        lane, width, chunks = cute.arch.lane_idx(), self.quantizing.box_bytes, len(codes) // 4
        turn = lane * width // 128 % (width // 16)
        for chunk in range(chunks):
            place = (step * chunks + chunk) ^ turn
            store_shared(line + place * 16, codes[4 * chunk : 4 * chunk + 4], 16)

    @cute.jit
    def store_scales(self, word, warp, row, column):
        """Four scales of a thread's row; a tile's rows below the output's last one have zeros."""
        rows, columns = self.pipeline.extent
        word = select_(row + cute.arch.lane_idx() < rows, word, Uint32(0))
        width = 4 * self.quantizing.stored.block[1]  # columns of a tile
        tile = row // 128 * cute.ceil_div(columns, width) + column // width
        if row - warp * 32 < rows and column // width * width < columns:
            start = self.scales.iterator.toint() + Int64(tile) * 512
            place = cute.arch.lane_idx() * 16 + warp * 4
            store_global(start + place, [word], 4)
