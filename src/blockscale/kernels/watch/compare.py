# mypy: ignore-errors
"""Some blocks of a quantized matrix beside what they were made of: part of ``kernel``."""

from __future__ import annotations

import cutlass
import numpy as np
from cutlass import Float32, Float64, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from ...error_sums import SLACK
from ...formats import FP32, get_format
from ..common import ptx
from ..common.arithmetic import element
from ..common.scale_place import scale_place
from ..common.watch_vector import OCTAVES, nan_code
from ..quantizers import dequantize_ptx
from .config import LANE, THREADS, WatchConfig, Word

__all__ = ["MAGNITUDE", "Comparison"]

MAGNITUDE = 0x7FFFFFFF  # of fp32


class Comparison:
    """Of lines, along which blocks run: rows or columns of what ``Watch`` is given."""

    def __init__(self, config: WatchConfig):
        self.config = config
        self.format = get_format(config.format)
        self.nan_code = nan_code(self.format)

    def load_scale(self, scale, where, k):
        """A scale as it is stored, in a word."""
        config = self.config
        place = scale_place(scale, where, (config.layout, config.axis), self.format, k)
        return ptx.load_global(scale.iterator.toint() + place, self.format.scale.nbytes)

    def code(self, word):
        """What is counted of a scale."""
        return (word >> 23) & Uint32(255) if self.format.scale is FP32 else word

    def load_element(self, x, where, sizes):
        """As fp32; past the end, 0."""
        (line, along), (lines, k), dtype = where, sizes, self.config.dtype
        inside = cutlass.min(line, lines - 1), cutlass.min(along, k - 1)
        down, right = x.stride if self.config.axis == -1 else x.stride[::-1]
        place = Int64(inside[0]) * down + Int64(inside[1]) * right
        word = ptx.load_global(x.iterator.toint() + place * dtype.itemsize, dtype.itemsize)
        value = element(word, 0, dtype)
        known = (line < lines) & (along < k)
        return Float32(cutlass.select_(known, value, Float32(0.0)))

    @cute.jit
    def compare_picks(self, x, data, scale, global_scale, places, counts, row, sizes):
        """Picked blocks with what they were made of: a few lanes have a block, a lane four elements
        of it."""
        lines, across, k = sizes
        size, count = self.format.block_size, places.shape[0]
        lanes = size // LANE
        at_once, own = 32 // lanes, cute.arch.lane_idx() % lanes
        warps = THREADS // 32
        warp = cute.arch.block_idx()[0] * warps + cute.arch.thread_idx()[0] // 32
        factor = None
        if const_expr(global_scale is not None):
            factor = ptx.load_global_float(global_scale.iterator.toint())
        for start in range(warp * at_once, count, cute.arch.grid_dim()[0] * warps * at_once):
            number = start + cute.arch.lane_idx() // lanes
            place = Int32(
                ptx.load_global(
                    places.iterator.toint() + Int64(cutlass.min(number, count - 1)) * 4, 4
                )
            )
            line, block = place // across, place % across
            word = self.load_scale(scale, (line // self.format.block[0], block), k)
            there = cutlass.max(cutlass.min(k - block * size - own * LANE, LANE), 0)
            known = (number < count) & (self.code(word) != Uint32(self.nan_code))
            there = Int32(cutlass.select_(known, there, Int32(0)))
            exact = [
                self.load_element(x, (line, block * size + own * LANE + i), (lines, k))
                for i in range(LANE)
            ]
            exact = [
                Float32(cutlass.select_(i < there, value, Float32(0.0)))
                for i, value in enumerate(exact)
            ]
            scale_value = dequantize_ptx.scale_value(word, self.format.scale.name)
            values, limit = self.dequantize(data, (line, block, own), scale_value, factor)
            self.tally(exact, values, limit, there, counts)
            self.tally_octaves(exact, lanes, counts)
            errors = [
                Float32(cutlass.select_(i < there, ptx.subtract(a, b), Float32(0.0)))
                for i, (a, b) in enumerate(zip(values, exact, strict=True))
            ]
            signal, noise = _squares(exact), _squares(errors)
            signal, noise = _added_up(signal, lanes), _added_up(noise, lanes)
            if (own == 0) & (number < count):
                words = ptx.words_of_double(signal) + ptx.words_of_double(noise)
                ptx.store_global(row + (Int64(Word.PICKS) + number * 4) * 4, words, 16)

    def dequantize(self, data, where, scale, factor):
        """Values of a lane's elements, and the largest that their block can hold."""
        (line, block, own), format = where, self.format
        stored = format.element.stored(format.block_size)
        width = format.element.stored(LANE)
        rows = self.config.axis == -1 or self.config.turned
        down, right = data.stride if rows else data.stride[::-1]
        word = Uint32(0)
        for i in range(width):
            along = Int64(block) * stored + own * width + i
            place = Int64(line) * down + along * right
            word = word | ptx.load_global(data.iterator.toint() + place, 1) << (8 * i)
        found = dequantize_ptx.values([word], format.element.name, LANE)
        limit = ptx.multiply(scale, Float32(float(np.float32(format.element.max * SLACK))))
        found = [ptx.multiply(value, scale) for value in found]
        if factor is not None:
            found, limit = [ptx.multiply(v, factor) for v in found], ptx.multiply(limit, factor)
        return found, limit

    @cute.jit
    def tally(self, exact, values, limit, there, counts):
        zeros = quantized_zeros = saturated = Int32(0)
        for i in range_constexpr(LANE):
            magnitude = exact[i].bitcast(Uint32) & Uint32(MAGNITUDE)
            value = values[i].bitcast(Uint32) & Uint32(MAGNITUDE)
            inside = Int32(cutlass.select_(i < there, Int32(1), Int32(0)))
            zeros += Int32(cutlass.select_(magnitude == Uint32(0), inside, Int32(0)))
            quantized_zeros += Int32(cutlass.select_(value == Uint32(0), inside, Int32(0)))
            beyond = magnitude.bitcast(Float32) > limit
            saturated += Int32(cutlass.select_(beyond, inside, Int32(0)))
        found = (Word.COMPARED, there), (Word.ZEROS, zeros), (Word.QUANTIZED_ZEROS, quantized_zeros)
        for word, number in (*found, (Word.SATURATED, saturated)):
            if number > 0:
                ptx.add_shared(counts + word * 4, Uint32(number))

    @cute.jit
    def tally_octaves(self, exact, lanes: cutlass.Constexpr, counts):
        """Of the quotient by the largest magnitude of the block, which other lanes may have."""
        most = Uint32(0)
        for i in range_constexpr(LANE):
            most = cutlass.max(most, exact[i].bitcast(Uint32) & Uint32(MAGNITUDE))
        distance = 1
        for _ in range_constexpr(lanes.bit_length() - 1):
            most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, distance))
            distance *= 2
        for i in range_constexpr(LANE):
            magnitude = exact[i].bitcast(Uint32) & Uint32(MAGNITUDE)
            if magnitude > Uint32(0):
                ratio = ptx.divide(magnitude.bitcast(Float32), most.bitcast(Float32))
                octave = cutlass.min(Int32(127) - Int32(ratio.bitcast(Uint32) >> 23), OCTAVES - 1)
                ptx.add_shared(counts + (Word.OCTAVES + octave) * 4, Uint32(1))

    @cute.jit
    def add_up_picks(self, row, count):
        """The sums of all picked blocks, by a warp of the CTA that is last."""
        lane = cute.arch.lane_idx()
        if cute.arch.thread_idx()[0] < 32:
            signal = noise = Float64(0.0)
            for i in range(lane, count, 32):
                words = ptx.load_words(row + (Int64(Word.PICKS) + i * 4) * 4)
                signal = ptx.add_doubles(signal, ptx.double_of_words(*words[:2]))
                noise = ptx.add_doubles(noise, ptx.double_of_words(*words[2:]))
            signal, noise = _added_up(signal, 32), _added_up(noise, 32)
            if lane == 0:
                words = ptx.words_of_double(signal) + ptx.words_of_double(noise)
                ptx.store_global(row + Word.SIGNAL * 4, words, 16)


def _squares(values: list):
    """The fp64 sum."""
    total = ptx.square(values[0])
    for value in values[1:]:
        total = ptx.add_square(total, value)
    return total


@cute.jit
def _added_up(value, lanes: cutlass.Constexpr):
    """The fp64 sum over so many lanes, in each of them."""
    distance = 1
    for _ in range_constexpr(lanes.bit_length() - 1):
        low, high = ptx.words_of_double(value)
        other = ptx.double_of_words(
            cute.arch.shuffle_sync_bfly(low, distance), cute.arch.shuffle_sync_bfly(high, distance)
        )
        value = ptx.add_doubles(value, other)
        distance *= 2
    return value
