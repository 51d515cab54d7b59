# mypy: ignore-errors
"""A, widened to bf16 once for all tiles of B, its columns in the order of B's.

Each of the four threads that share a row of B in a wgmma has 32 neighbours of 128 columns of K, or
16 of 64. A chunk of 16 bytes of A has a pair of each of these four blocks: seen as (4, 2, 2, 4, 2),
columns a, b, c, d, e are stored as b, c, d, a, e; without b where it is 64. A thread takes the same
octet of each block, and writes 64 bytes. Columns past K, up to a multiple of 128, are zeros. (A
product that takes columns as they are gets them so.)

Of a product whose CTAs share tiles it sets the counters to zero, too.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, const_expr, cute, range_constexpr

from ...formats import get_format
from ..common import shared
from ..common.pdl import pdl_launch_dependents, pdl_wait
from ..common.ptx import store_global, store_shared
from ..common.tensor_specs import HostFunction, any_tensor
from .dequant import WIDENERS, ue4m3_factors
from .load_if import load_if
from .mixed_config import BF16, BLOCK_K, COUNTERS
from .permute_config import PermuteConfig
from .ptx import _asm, ld_shared

__all__ = ["PermuteActivations", "host_function"]

_THREADS = 128  # of a block
_ONES = 0x7F7F7F7F  # of E8M0
_GAIN = 0x43004300  # what scales of UE4M3 lack, 2^7, as bf16, twice


class PermuteActivations:
    """The kernel of a :class:`PermuteConfig` and the host code that launches it."""

    def __init__(self, config: PermuteConfig):
        self.block_k, self.wide = config.block_k, config.a_format == BF16
        self.applies_scales = config.applies_scales
        self.apart = (config.block_k or BLOCK_K) // 4  # columns, of what two lanes have
        if not self.wide:
            self.format = get_format(config.a_format)
            self.widener = WIDENERS[self.format.element.name]
        self.bits = 16 if self.wide else self.widener.bits

    @cute.jit
    def __call__(self, a, scale, out, counters, stream):
        """Launch. ``a`` (M, K) as bytes, or bf16; ``scale`` (M, K / block), or None if scales are
        not applied; ``out`` (M, K rounded up to 128); ``counters``: words, the first ``COUNTERS``
        of which become zero, or None."""
        threads = out.shape[0] * (out.shape[1] // 32)
        self.kernel(a, scale, out, counters, Int32(threads)).launch(
            grid=(cute.ceil_div(threads, _THREADS), 1, 1),
            block=(_THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, a, scale, out, counters, threads):
        pdl_wait()
        # a product may come, and bring B; for what is written here it waits
        pdl_launch_dependents()
        index = cute.arch.block_idx()[0] * _THREADS + cute.arch.thread_idx()[0]
        if const_expr(counters is not None):
            for first in range(index * 4, COUNTERS, cute.arch.grid_dim()[0] * _THREADS * 4):
                store_global(counters.iterator.toint() + Int64(first) * 4, [Int32(0)] * 4, 16)
        # threads past the last vote, too: they read nothing
        across = Int32(out.shape[1]) // 32
        row, place = index // across, index % across
        k = a.shape[1] * (1 if self.bits == 16 else 8 // self.bits)
        k = cutlass.select_(index < threads, Int32(k), Int32(0))
        own = self.apart // 8  # octets of a lane
        first = place // own * (4 * self.apart) + place % own * 8

        line = a.iterator.toint() + Int64(row) * a.stride[0] * (2 if self.wide else 1)
        start = line + (first * self.bits >> 3)
        octets = [self.load(start, self.apart * i, first, k) for i in range(4)]
        if const_expr(self.wide):
            octets = [self.tail(octets[i], start, self.apart * i, first, k) for i in range(4)]
        else:
            scales = Int32(_ONES)
            if const_expr(self.applies_scales):
                scales = self.scales(scale, row, first, k)
            octets = self.widen(octets, scales)
        target, line = out.iterator.toint(), Int64(row) * out.stride[0]
        if const_expr(self.block_k > 0):
            chunk = Int32((line + 32 * place) // 8)
            self.store_in_order(target, list(zip(*octets, strict=True)), chunk, index, threads)
        elif index < threads:
            target = target + (line + first) * 2
            for i, octet in enumerate(octets):
                store_global(target + i * self.apart * 2, octet, 16)

    @cute.jit
    def store_in_order(self, target, chunks: cutlass.Constexpr, chunk, index, threads):
        """Four chunks of 16 bytes that follow each other, the ``chunk``-th ones, of all threads of
        a warp: through shared memory, so that neighbours store neighbours, and whole sectors."""
        memory = cutlass.memory.SmemAllocator()
        place = shared.allocate(memory, _THREADS * 64)
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        # chunks of two threads fill 128 bytes: the next two have theirs in another order
        for i in range_constexpr(4):
            own = place + thread * 64 + ((thread // 2 % 4) ^ i) * 16
            store_shared(own, list(chunks[i]), 16)
        cute.arch.sync_warp()
        first = place + (thread - lane) * 64 + lane // 4 * 64 + ((lane % 4) ^ (lane // 8)) * 16
        for i in range_constexpr(4):
            words, other = ld_shared(first, i * 512, 4, Int32), i * 8 + lane // 4  # whose it is
            found = cute.arch.shuffle_sync(chunk, other) + lane % 4
            if index - lane + other < threads:
                store_global(target + Int64(found) * 16, words, 16)

    # --- elements ---------------------------------------------------------------------------------

    def load(self, start, column: int, first, k) -> list:
        """Words of eight elements, ``column`` after those at ``start``; zeros unless all of them
        are there."""
        return load_if(start, column * self.bits // 8, self.bits, first + (column + 8) <= k)

    @cute.jit
    def tail(self, words, start, column: cutlass.Constexpr, first, k):
        """Those of the first ``k`` columns, where an octet has others."""
        here = first + column
        if here < k and k < here + 8:
            halves = [load_if(start, 2 * (column + i), 2, here + i < k)[0] for i in range(8)]
            words = [halves[i] | halves[i + 1] << 16 for i in range(0, 8, 2)]
        return words

    # --- block scales -----------------------------------------------------------------------------

    def scales(self, scale, row, first, k):
        """Those of four octets, as bytes of a word."""
        size = self.format.block_size
        line, found = scale.iterator.toint() + Int64(row) * scale.stride[0], []
        for i in range(4):
            column = first + self.apart * i
            found += load_if(line + column // size, 0, 1, column < k)
        return found[0] | found[1] << 8 | found[2] << 16 | found[3] << 24

    def widen(self, octets: list, scales) -> list:
        """Four octets times their scales, each of them four pairs."""
        widener = self.widener
        fine = self.format.scale.name == "UE4M3"
        if fine:
            factors = [*ue4m3_factors(scales), *ue4m3_factors(scales >> 16)]
        else:
            *factors, left_out = widener.e8m0_factors(scales, 4)
            one = cute.arch.grid_dim()[1]
            for i, words in enumerate(octets):
                seen = widener.marked(Int32(0), words, one)
                factors[i] = widener.poisoned(factors[i], seen)
        wide = [widener.octet(*each) for each in zip(octets, factors, strict=True)]
        pairs = [octet[i] for i in range(4) for octet in wide]
        if fine:
            pairs = [_gained(pair) for pair in pairs]
        else:
            pairs = widener.rescaled(pairs, scales, 4, left_out)
        return [pairs[i::4] for i in range(4)]


# --- single instructions --------------------------------------------------------------------------


def _gained(pair):
    """A pair times what it lacks."""
    code = f"{{ .reg .b32 x; mov.b32 x, 0x{_GAIN:08x}; mul.rn.bf16x2 $0, $1, x; }}"
    return _asm(code, [Int32], [pair], ["r"])[0]


def host_function(config: PermuteConfig):
    """The host function of a kernel, which takes tensors of any shape."""
    wide = config.a_format == BF16
    return HostFunction(
        config.arch,
        PermuteActivations(config),
        any_tensor(cutlass.BFloat16 if wide else cutlass.Uint8, 2, 16, True),
        any_tensor(cutlass.Uint8, 2, 1) if config.applies_scales else None,
        any_tensor(cutlass.BFloat16, 2, 16, True),
        any_tensor(cutlass.Int32, 1, 16) if config.clears else None,
    )
