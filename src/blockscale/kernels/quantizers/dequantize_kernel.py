# mypy: ignore-errors
"""The dequantizer: elements times the scales of their blocks, from one read.

A thread takes a few rows of as many columns as make 16 bytes of the output, so that lanes side by
side read and write whole sectors; it loads all that it needs before it computes. Threads are
counted through the matrix, rows of threads one after another, whatever its shape.

Scales are found by their place across the contraction, "outer", and along it, "block". A thread
needs those of a few neighbours across one block: of its rows where blocks lie along the rows of
memory, of its columns where they lie down them.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr
from cutlass.cute.runtime import make_fake_tensor

from ...formats import get_format
from ..common import ptx
from ..common.arithmetic import multiply
from ..common.numeric import NUMERIC
from ..common.pdl import pdl_wait
from ..common.scale_place import scale_place
from ..common.tensor_specs import HostFunction, any_tensor
from . import dequantize_ptx
from .dequantize_config import THREADS, DequantizeConfig

__all__ = ["Dequantizer", "host_function"]


class Dequantizer:
    """The kernel of a :class:`DequantizeConfig` and the host code that launches it."""

    def __init__(self, config: DequantizeConfig):
        self.config = config
        self.format = get_format(config.format)
        self.blackwell = config.arch.startswith("sm_10")
        self.per_store = config.store // config.dtype.itemsize

    @cute.jit
    def __call__(self, data, scale, out, global_scale, stream):
        """Launch. ``data`` (M, bytes), ``out`` (M, K) and compact ``scale``, all of them with a
        dimension for matrices in front if batched; ``scale`` of another layout as that stores it;
        ``global_scale`` () fp32 or None.
        """
        config = self.config
        rows, columns = out.shape[-2], out.shape[-1]
        threads = cute.ceil_div(rows, config.rows) * cute.ceil_div(columns, config.columns)
        matrices = out.shape[0] if const_expr(config.batched) else 1
        self.kernel(data, scale, out, global_scale).launch(
            grid=(cute.ceil_div(threads, THREADS), matrices, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, data, scale, out, global_scale):
        config = self.config
        pdl_wait()
        across = cute.ceil_div(out.shape[-1], config.columns)
        index = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if index < across * cute.ceil_div(out.shape[-2], config.rows):
            row, column = index // across * config.rows, index % across * config.columns
            self.dequantize(data, scale, out, global_scale, row, column)

    @cute.jit
    def dequantize(self, data, scale, out, global_scale, row, column):
        """The rows from ``row`` on, in the columns from ``column`` on."""
        config, element = self.config, self.format.element
        columns, last = out.shape[-1], out.shape[-2] - 1 - row
        line = self.matrix(data) + Int64(row) * data.stride[-2]
        at, loaded = column // element.codes_per_group, []
        for i in range_constexpr(config.rows):
            loaded.append(self.load(line + steps(i, last, data.stride[-2], 1), at, data.shape[-1]))
        scales = self.scales(scale, row, column, out.shape)
        if const_expr(config.has_global_scale):
            word = ptx.load_global(global_scale.iterator.toint(), 4)
            factor = [word.bitcast(Float32)] * config.columns

        size = config.dtype.itemsize
        target = self.matrix(out) + (Int64(row) * out.stride[-2] + column) * size
        for i in range_constexpr(config.rows):
            found = dequantize_ptx.values(loaded[i], element.name, config.columns)
            mine = scales if config.down else [scales[i]] * config.columns
            found = multiply(found, mine, self.blackwell)
            if const_expr(config.has_global_scale):
                found = multiply(found, factor, self.blackwell)
            words = dequantize_ptx.words(found, config.dtype)
            if i <= last:
                self.store(target + steps(i, last, out.stride[-2], size), words, column, columns)

    def matrix(self, x):
        """The address of this block's matrix."""
        address = x.iterator.toint()
        if not self.config.batched:
            return address
        which = Int64(cute.arch.block_idx()[1])
        return address + which * x.stride[0] * (x.element_type.width // 8)

    # --- elements ---------------------------------------------------------------------------------

    def load(self, line, at, width) -> list:
        """Words of a thread's codes from byte ``at`` of a line of ``width`` bytes on."""
        config = self.config
        if config.load == config.nbytes:
            return dequantize_ptx.load(line + at, config.load, once=True)
        words, size = [], config.load
        for first in range(0, config.nbytes, size):
            # what would lie past the end is loaded from before it, and not stored
            place = cutlass.min(at + first, width - size)
            (word,) = dequantize_ptx.load(line + place, size, once=True)
            if first % 4:
                words[-1] = words[-1] | (word << Uint32(first % 4 * 8))
            else:
                words.append(word)
        return words

    @cute.jit
    def store(self, target, words, column, columns):
        size = self.config.store
        if const_expr(size == 16):
            ptx.store_global(target, words, size)
        else:
            for j in range_constexpr(16 // size):
                if const_expr(size >= 4):
                    some = words[j * size // 4 : (j + 1) * size // 4]
                else:
                    some = [words[j // 2] >> Uint32(j % 2 * 16)]
                if column + j * self.per_store < columns:
                    ptx.store_global(target + j * size, some, size)

    # --- scales -----------------------------------------------------------------------------------

    def scales(self, scale, row, column, shape) -> list:
        """fp32 scales of a thread's rows, or of its columns where blocks lie down them."""
        config, (high, size) = self.config, self.format.block
        outer, along = (column, row) if config.down else (row, column)
        (outers, k) = (shape[-1], shape[-2]) if config.down else (shape[-2], shape[-1])
        itemsize, block = self.format.scale.nbytes, along // size
        lines = config.layout, config.axis
        where = outer // high, block
        start = self.matrix(scale) + scale_place(scale, where, lines, self.format, k)
        if high > 1:  # one for all of them
            return [self.decode(dequantize_ptx.load(start, itemsize)[0])] * config.outer
        if config.layout == "sm90":  # all that is there
            outers = scale.shape[1]
        found, each = [], config.scale_load // itemsize
        for i in range(0, config.outer, each):
            # what would lie past the end is loaded from before it, and multiplies nothing
            step = self.step(scale, i, outers - each - outer)
            for word in dequantize_ptx.load(start + step, config.scale_load):
                codes = min(config.scale_load, 4) // itemsize
                found += [self.decode(word >> Uint32(8 * j)) for j in range(codes)]
        return found

    def decode(self, code):
        return dequantize_ptx.scale_value(code, self.format.scale.name)

    def step(self, scale, i: int, last):
        """Bytes from a scale to the ``i``-th one after it across the contraction, or the last."""
        layout, itemsize = self.config.layout, self.format.scale.nbytes
        if layout == "compact":
            return steps(i, last, scale.stride[-2 if self.config.axis == -1 else -1], itemsize)
        apart = {"tcgen05": 16, "packed": 4, "sm90": itemsize}[layout]
        return cutlass.min(Int32(i), last) * apart


def steps(i: int, last, stride, itemsize: int):
    """Bytes to the ``i``-th line from here, or to the last; strides have 31 bits, in bytes."""
    if i == 0:
        return 0
    return Int64(cutlass.min(Int32(i), last)) * Int64(Int32(stride) * itemsize)


def host_function(config: DequantizeConfig):
    """The host function of a kernel, which takes tensors of any shape."""
    format, leads = get_format(config.format), int(config.batched)
    scale = cutlass.Float32 if format.scale.nbytes == 4 else cutlass.Uint8
    if config.layout == "tcgen05":
        scales = any_tensor(scale, 1, 1)
    elif config.layout == "packed":
        scales = _any(Int32, 2, 4)
    else:
        scales = _any(scale, 2 + leads, format.scale.nbytes, contiguous=False)
    return HostFunction(
        config.arch,
        Dequantizer(config),
        _any(cutlass.Uint8, 2 + leads, config.load),
        scales,
        _any(NUMERIC[config.dtype], 2 + leads, config.store),
        any_tensor(Float32, 0, 4) if config.has_global_scale else None,
    )


def _any(dtype, rank: int, align: int, contiguous: bool = True):
    """A tensor of any shape and strides, but for that of its last dimension if contiguous."""
    sizes = tuple(cute.sym_int32() for _ in range(rank))
    strides = [cute.sym_int64() for _ in range(rank)]
    if contiguous:
        strides[-1] = 1
    return make_fake_tensor(dtype, sizes, tuple(strides), assumed_align=align)
