# mypy: ignore-errors
"""What a watch sees of a quantized matrix, in one launch: counts of the codes of its scales, the
largest magnitude, what some blocks lost of what they were made of, and what is not finite first.

Everything is counted in integers but sums of squares, which the CTA that is done last adds up in
one order: so neither CTAs nor threads decide anything. Scales are counted as they lie. Where some
are not finite, that CTA looks for the first block of those, and in it for the element.
"""

from __future__ import annotations

import cutlass
from cutlass import (
    Float32,
    Int32,
    Int64,
    Uint32,
    const_expr,
    cute,
    range_constexpr,
)

from ...dtypes import BFLOAT16
from ...formats import get_format
from ..common import ptx
from ..common.numeric import NUMERIC
from ..common.pdl import pdl_wait
from ..common.shared import allocate, clear
from ..common.tensor_specs import HostFunction, any_strided, any_tensor
from ..ranks import signals
from .compare import MAGNITUDE, Comparison
from .config import COUNTED, THREADS, Shared, WatchConfig, Word

__all__ = ["Watch", "host_function"]

_MAGNITUDES = 0x7FFF7FFF  # of two halves
_INFINITY = 0x7F800000
_MOST = 0x7FFFFFFF  # blocks, and more


class Watch(Comparison):
    """The kernel of a :class:`WatchConfig` and the host code that launches it."""

    @cute.jit
    def __call__(self, x, data, scale, global_scale, places, row, sizes, stream):
        """Launch, of a matrix of lines, rows or columns, along which blocks run.

        ``x`` (M, K), None where nobody has it; ``data`` as it lies; ``scale`` as its layout stores
        it; ``global_scale`` () fp32 or None; ``places`` (n,) int32, picked blocks, counted along
        lines; ``row``: (any, ``row_words(n)``) int32, and which of these rows is written, zeros
        before; ``sizes``: lines, elements of a line, and CTAs.
        """
        self.kernel(x, data, scale, global_scale, places, row, sizes[:2]).launch(
            grid=(sizes[2], 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, x, data, scale, global_scale, places, row, sizes):
        (rows, which), (lines, k) = row, sizes
        pdl_wait()
        thread, ctas = cute.arch.thread_idx()[0], cute.arch.grid_dim()[0]
        across = cute.ceil_div(k, self.format.block_size)
        down = cute.ceil_div(lines, self.format.block[0])
        row = rows.iterator.toint() + Int64(which) * rows.stride[0] * 4
        memory = cutlass.memory.SmemAllocator()
        counts = allocate(memory, COUNTED * 4)
        found = allocate(memory, Shared.NBYTES)
        clear(counts, COUNTED * 4, THREADS)
        clear(found, Shared.NBYTES, THREADS)
        cute.arch.sync_threads()
        self.count(scale, counts, down * across)
        if const_expr(x is not None):
            self.find_amax(x, found, (lines, k))
            picked = places, counts, row, (lines, across, k)
            self.compare_picks(x, data, scale, global_scale, *picked)
        if const_expr(global_scale is not None):
            self.copy_global_scale(global_scale, row)
        cute.arch.sync_threads()
        self.hand_on(counts, found, row)
        cute.arch.sync_threads()
        if thread == 0:
            before = signals.arrive(row + Word.ARRIVED * 4)
            ptx.store_shared(found + Shared.ARRIVED, [Uint32(before)], 4)
        cute.arch.sync_threads()
        if ptx.load_shared(found + Shared.ARRIVED, 4)[0] == Uint32(ctas - 1):  # all others are done
            if const_expr(x is not None):
                self.add_up_picks(row, places.shape[0])
            self.find_nonfinite(x, scale, found, row, (lines, down, across, k))

    # --- scales -----------------------------------------------------------------------------------

    @cute.jit
    def count(self, scale, counts, blocks):
        """Each CTA in its own memory; of all that is stored, less the zeros that fill tiles."""
        step = cute.arch.grid_dim()[0] * THREADS
        first = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        nbytes = cute.size(scale.shape) * (scale.element_type.width // 8)
        for i in range(first, nbytes // 4, step):
            self.count_word(counts, ptx.load_global(self.scale_address(scale, i * 4), 4))
        for i in range(first, nbytes % 4, step):  # of one byte each
            place = nbytes - 1 - i
            self.count_code(counts, ptx.load_global(self.scale_address(scale, place), 1))
        if first == 0:
            more = nbytes // self.format.scale.nbytes - blocks
            ptx.add_shared(counts, Uint32(-more))

    def scale_address(self, scale, place):
        return scale.iterator.toint() + Int64(place)

    def count_word(self, counts, word):
        if self.format.scale.nbytes == 4:
            self.count_code(counts, self.code(word))
            return
        for i in range(4):
            self.count_code(counts, (word >> Uint32(8 * i)) & Uint32(0xFF))

    def count_code(self, counts, code):
        ptx.add_shared(counts + code * 4, Uint32(1))

    @cute.jit
    def hand_on(self, counts, found, row):
        """Add what this CTA has found to what others have."""
        thread = cute.arch.thread_idx()[0]
        for i in range(thread, COUNTED, THREADS):
            number = ptx.load_shared(counts + i * 4, 4)[0]
            if number != Uint32(0):
                ptx.add_global(row + i * 4, number)
        if thread == 0:
            ptx.max_global(row + Word.AMAX * 4, ptx.load_shared(found + Shared.AMAX, 4)[0])

    @cute.jit
    def copy_global_scale(self, global_scale, row):
        if cute.arch.block_idx()[0] + cute.arch.thread_idx()[0] == 0:
            word = ptx.load_global(global_scale.iterator.toint(), 4)
            ptx.store_global(row + Word.GLOBAL_SCALE * 4, [word], 4)

    # --- elements ---------------------------------------------------------------------------------

    @cute.jit
    def find_amax(self, x, found, sizes):
        """Of all elements, which lie together in some order: as bits of fp32 without a sign."""
        lines, k = sizes
        dtype = self.config.dtype
        step = cute.arch.grid_dim()[0] * THREADS
        first = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        base, most = x.iterator.toint(), Uint32(0)
        total, each = Int64(lines) * k, 16 // dtype.itemsize
        vectors = Int32(total // each)
        for i in range(first, vectors, step):
            for word in ptx.load_words(base + Int64(i) * 16):
                most = self.larger(most, word)
        for i in range(first, Int32(total % each), step):
            place = (Int64(vectors) * each + i) * dtype.itemsize
            most = self.larger(most, ptx.load_global(base + place, dtype.itemsize))
        most = self.as_fp32(most)
        for i in range_constexpr(5):
            most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, 1 << i))
        if cute.arch.thread_idx()[0] % 32 == 0:
            ptx.max_shared(found + Shared.AMAX, most)

    def larger(self, most, word):
        """Of the magnitudes in two words, each in its place."""
        if self.config.dtype.itemsize == 4:
            return cutlass.max(most, word & Uint32(MAGNITUDE))
        return ptx.max_u16x2(most, word & Uint32(_MAGNITUDES))

    def as_fp32(self, most):
        """The larger magnitude of a word, as bits of fp32."""
        dtype = self.config.dtype
        if dtype.itemsize == 4:
            return most
        most = cutlass.max(most & Uint32(0xFFFF), most >> 16)
        if dtype == BFLOAT16:
            return most << 16
        return ptx.half_to_float(most, False).bitcast(Uint32)

    @cute.jit
    def find_nonfinite(self, x, scale, found, row, sizes):
        """The first block, and in it the first element, if there is any."""
        if ptx.load_global(row + (Word.CODES + self.nan_code) * 4, 4) > Uint32(0):
            self.find_block(scale, found, row, sizes[1:])
            if const_expr(x is not None):
                self.find_element(x, found, row, sizes)

    @cute.jit
    def find_block(self, scale, found, row, sizes):
        """The first that is not finite, as compact scales lie: by the CTA that is last."""
        down, across, k = sizes
        thread, total = cute.arch.thread_idx()[0], down * across
        for start in range(0, total, THREADS):
            cute.arch.sync_threads()
            if ptx.load_shared(found + Shared.BLOCK, 4)[0] == Uint32(0):
                cute.arch.sync_threads()
                number = start + thread
                if number < total:
                    where = self.where(number, (down, across))
                    code = self.code(self.load_scale(scale, where, k))
                    if code == Uint32(self.nan_code):
                        ptx.max_shared(found + Shared.BLOCK, Uint32(_MOST - number))
            else:
                cute.arch.sync_threads()
        cute.arch.sync_threads()
        if thread == 0:
            number = Uint32(_MOST) - ptx.load_shared(found + Shared.BLOCK, 4)[0]
            ptx.store_global(row + Word.FIRST * 4, [number + 1], 4)

    def where(self, number, sizes):
        """Line and block of a number."""
        down, across = sizes
        if self.config.axis == -1:
            return number // across, number % across
        return number % down, number // down

    @cute.jit
    def find_element(self, x, found, row, sizes):
        """The first of that block that is not finite."""
        lines, down, across, k = sizes
        height, size = self.format.block
        thread = cute.arch.thread_idx()[0]
        number = Int32(Uint32(_MOST) - ptx.load_shared(found + Shared.BLOCK, 4)[0])
        line, block = self.where(number, (down, across))
        for i in range(thread, height * size, THREADS):
            where = line * height + i // size, block * size + i % size
            bits = self.load_element(x, where, (lines, k)).bitcast(Uint32)
            if (bits & Uint32(MAGNITUDE)) >= Uint32(_INFINITY):
                ptx.max_shared(found + Shared.ELEMENT, Uint32(height * size - i))
        cute.arch.sync_threads()
        left = Int32(ptx.load_shared(found + Shared.ELEMENT, 4)[0])
        if (thread == 0) & (left > 0):
            i = height * size - left
            where = line * height + i // size, block * size + i % size
            bits = self.load_element(x, where, (lines, k)).bitcast(Uint32)
            ptx.store_global(row + Word.ELEMENT * 4, [Uint32(i + 1)], 4)
            ptx.store_global(row + Word.VALUE * 4, [bits], 4)


def host_function(config: WatchConfig):
    """The host function of a kernel, which takes matrices of any shape."""
    format, x = get_format(config.format), None
    if config.dtype is not None:
        x = any_strided(NUMERIC[config.dtype], 2, config.dtype.itemsize)
    scale = Float32 if format.scale.nbytes == 4 else cutlass.Uint8
    if config.layout == "tcgen05":
        scales = any_tensor(scale, 1, 1)
    elif config.layout == "packed":
        scales = any_tensor(Int32, 2, 4)
    else:
        scales = any_strided(scale, 2, format.scale.nbytes)
    return HostFunction(
        config.arch,
        Watch(config),
        x,
        any_strided(cutlass.Uint8, 2, 1),
        scales,
        any_tensor(Float32, 0, 4) if config.has_global_scale else None,
        any_tensor(Int32, 1, 4),
        (any_tensor(Int32, 2, 16, spaced=True), Int32(0)),
        (Int32(0), Int32(0), Int32(0)),
    )
