# mypy: ignore-errors
"""A, widened from one place of shared memory to another: a warpgroup's work.

It writes rows of 64 elements, swizzled as wgmma reads them, two for a stage. A chunk of 16 bytes
has a pair of each of four blocks of columns: those which four threads have that share a row of B.
"""

from __future__ import annotations

from cutlass import Int32, const_expr, cute, range_constexpr

from . import ptx, widened_ptx
from .widen import WIDENERS, ue4m3_factors
from .widened_config import Config

__all__ = ["Converter"]


class Converter:
    """Threads of a row share its octets: the same ones of each of the four blocks."""

    def __init__(self, config: Config):
        self.config = config
        self.widener = WIDENERS[config.elements[0]]
        self.fine = config.format.scale.name == "UE4M3"
        self.parts = min(4, 128 // config.tile[0])  # threads of a row
        self.halves = 2 if self.parts == 1 else 1  # of a stage, of which a thread has octets
        self.octets = 1 if self.parts == 4 else 2  # of each of these
        self.loaded = self.octets if self.widener.folds else 1  # at once: as registers allow

    def start(self, shared, barriers, wide_barriers, thread) -> None:
        config, bits = self.config, self.widener.bits
        tiles, scales, wide = shared
        self.full, self.empty = barriers
        self.wide_full, self.wide_empty = wide_barriers
        rows = config.tile[0]
        row, part = thread % rows, thread // rows
        first = part % 4 * (4 // self.parts)
        half, octet = first // 2, first % 2
        nbytes = config.row_bytes[0]
        swizzle = row // 2 % 4 if nbytes == 64 else row % 8
        chunk = half if bits == 8 else 0
        within = 8 * octet if bits == 8 else 8 * half + 4 * octet
        self.tiles = ptx.pin(tiles + row * nbytes + (chunk ^ swizzle) * 16 + within)
        self.scales = ptx.pin(scales + row * config.scale_row)
        place = wide + half * (rows * 128) + row * 128
        self.wide = ptx.pin(place + ((4 * octet) ^ (row % 8)) * 16)
        self.half = ptx.pin(half)
        self.one = cute.arch.grid_dim()[1]

    @cute.jit
    def __call__(self, blocks, state, advance):
        """Widen ``blocks`` stages; the next state of the pipelines."""
        config = self.config
        stage, phase, slot, turn = (cute.arch.make_warp_uniform(each) for each in state)
        for _ in range(blocks):
            cute.arch.mbarrier_wait(self.full + stage, phase)
            cute.arch.mbarrier_wait(self.wide_empty + slot, turn ^ 1)
            self.widen(stage, slot)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            widened_ptx.arrive_once((self.wide_full + slot).toint())
            widened_ptx.release((self.empty + stage).toint(), config.async_scales)
            slot, turn = advance(slot, turn, config.wide)
            stage, phase = advance(stage, phase, config.stages)
        return stage, phase, slot, turn

    @cute.jit
    def widen(self, stage, slot):
        """What is this thread's of a stage."""
        widener, count, rows = self.widener, self.widener.words, self.config.tile[0]
        target = self.wide + slot * (rows * 256)
        scales = self.read_scales(stage)
        for part in range_constexpr(0, self.halves * self.octets, self.loaded):
            half, first = part // self.octets, part % self.octets
            words = [self.load(stage, block, half, first) for block in range(4)]
            factors = self.factors(scales, words, half)
            for i in range_constexpr(self.loaded):
                octets = [
                    widener.octet(own[i * count :][:count], factor)
                    for own, factor in zip(words, factors, strict=True)
                ]
                pairs = [octets[block][j] for j in range(4) for block in range(4)]
                if const_expr(not self.fine):
                    pairs = widener.rescaled(pairs, scales[5], 4, scales[4])
                for j in range_constexpr(4):
                    place = target ^ (16 * (4 * (first + i) + j))
                    own = pairs[4 * j : 4 * j + 4]
                    widened_ptx.store_words(place + half * (rows * 128), own)

    def load(self, stage, block: int, half: int, first: int) -> list:
        """``loaded`` of a thread's octets, in a half of a block of 32 columns."""
        nbytes = self.config.tile[0] * self.config.row_bytes[0]
        base, words = self.tiles + stage * nbytes, self.loaded * self.widener.words
        if self.widener.bits == 8:
            return widened_ptx.load_words(base ^ (16 * (2 * block + half)), 8 * first, words)
        return widened_ptx.load_words(base ^ (16 * block), 8 * half, words)

    def read_scales(self, stage) -> list:
        """The words of a row's scales; or four factors, whether they are without the scales, and
        these."""
        address = self.scales + stage * self.config.scale_bytes[0]
        if self.fine:
            return widened_ptx.load_words(address, 0, 2)
        word = widened_ptx.load_words(address, 0, 1)[0]
        return [*self.widener.e8m0_factors(word, 4), word]

    def factors(self, scales: list, words: list, half: int) -> list:
        """Of four blocks, in half a stage."""
        if self.fine:
            pairs = [widened_ptx.take_bytes(word, self.half + half) for word in scales]
            return [factor for pair in pairs for factor in ue4m3_factors(pair)]
        found = []
        for factor, own in zip(scales[:4], words, strict=True):
            seen = self.widener.marked(Int32(0), own, self.one)
            found.append(self.widener.poisoned(factor, seen))
        return found
