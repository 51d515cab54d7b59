# mypy: ignore-errors
"""What tokens get of their experts: rows of theirs, weighted and added up, bit for bit
``reference.combine``.

A thread has 16 bytes of each of a token's rows. It loads several rows at once, and adds them one
after the other, in the order in which the token names its experts.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr, select_

from ..common import ptx
from ..common.arithmetic import add, multiply, narrow, widen
from ..common.numeric import NAN_WORD, NUMERIC
from ..common.pdl import pdl_wait
from ..common.tensor_specs import HostFunction, any_source, any_tensor
from .combine_config import CombineConfig

__all__ = ["Combine", "host_function"]


class Combine:
    """The kernel of a :class:`CombineConfig` and the host code that launches it."""

    def __init__(self, config: CombineConfig):
        self.config = config
        self.blackwell = config.arch.startswith("sm_10")

    @cute.jit
    def __call__(self, y, slots, weights, out, stream):
        """Launch. ``y`` (R, H); ``slots`` (tokens, top_k), rows of ``y``; ``weights`` like them,
        fp32, or None; ``out`` (tokens, H)."""
        config = self.config
        across = cute.ceil_div(y.shape[1], config.threads * config.vector)
        self.kernel(y, slots, weights, out).launch(
            grid=(slots.shape[0], across, 1),
            block=(config.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, y, slots, weights, out):
        config = self.config
        pdl_wait()
        token, tile, _ = cute.arch.block_idx()
        column = (tile * config.threads + cute.arch.thread_idx()[0]) * config.vector
        top_k = slots.shape[1]
        if column < y.shape[1]:
            total = (Float32(0.0),) * config.vector
            for first in range(0, top_k, config.chunk):
                pairs = [Int64(token) * top_k + first + j for j in range(config.chunk)]
                rows = [self.row_of(slots, pair, y.shape[0]) for pair in pairs]
                words = [self.load(y, row, column) for row in rows]
                for j in range_constexpr(config.chunk):
                    values = widen(words[j], config.dtype)
                    if const_expr(config.weighted):
                        weight = ptx.load_global_float(weights.iterator.toint() + pairs[j] * 4)
                        values = multiply(values, [weight] * config.vector, self.blackwell)
                    total = tuple(add(list(total), values, self.blackwell))
            self.store(out, token, column, narrow(list(total), config.out_dtype))

    def row_of(self, slots, pair, rows):
        """The row of a pair, -1 for one that is none of ``rows``."""
        size = self.config.index_bytes
        address = slots.iterator.toint() + pair * size
        row = Int32(ptx.load_global(address, 4))
        known = (row >= 0) & (row < rows)
        if size == 8:
            known = known & (ptx.load_global(address + 4, 4) == Uint32(0))
        return Int32(select_(known, row, Int32(-1)))

    def load(self, y, row, column) -> list:
        """16 bytes of a row; NaN of one that is none."""
        known = row >= 0
        start = Int64(cutlass.max(row, Int32(0))) * y.stride[0] + column
        words = ptx.load_words(y.iterator.toint() + start * self.config.dtype.itemsize)
        return [Uint32(select_(known, word, Uint32(NAN_WORD))) for word in words]

    def store(self, out, token, column, words: list) -> None:
        start = (Int64(token) * out.shape[1] + column) * self.config.out_dtype.itemsize
        for i in range(0, len(words), 4):
            some = words[i : i + 4]
            ptx.store_global(out.iterator.toint() + start + 4 * i, some, 4 * len(some))


def host_function(config: CombineConfig):
    """The host function of a kernel, which takes tensors of any shape."""
    index = Int32 if config.index_bytes == 4 else Int64
    return HostFunction(
        config.arch,
        Combine(config),
        any_source(config.dtype, True),
        any_tensor(index, 2, config.index_bytes),
        any_tensor(Float32, 2, 4) if config.weighted else None,
        any_tensor(NUMERIC[config.out_dtype], 2, 16),
    )
