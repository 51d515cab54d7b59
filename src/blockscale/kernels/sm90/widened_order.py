# mypy: ignore-errors
"""A in bf16: a stage's columns, put in the order of B's in place.

Rows of 128 columns are two tiles of 64, swizzled as wgmma reads them. A chunk of 16 bytes, eight
columns of one of the stage's four blocks of 32, becomes a pair of each block: those which the four
threads have that share a row of B.
"""

from __future__ import annotations

from cutlass import Int32, cute, range_constexpr

from . import ptx, widened_ptx
from .widened_config import Config

__all__ = ["Orderer"]


class Orderer:
    """Four threads of a warp share a row: each has a chunk of each block, the same ones."""

    def __init__(self, config: Config):
        self.config = config

    def start(self, shared, barriers, ordered_barriers, thread) -> None:
        tiles, _, _ = shared
        self.full, _ = barriers
        self.ordered, _ = ordered_barriers
        row, part = thread // 32 * 8 + thread % 8, thread % 32 // 8
        half, octet = part // 2, part % 2
        start = tiles + row * 128
        self.source = ptx.pin(start + (part ^ (row % 8)) * 16)
        self.target = ptx.pin(
            start + half * (self.config.tile[0] * 128) + ((4 * octet) ^ (row % 8)) * 16
        )

    @cute.jit
    def __call__(self, blocks, state, advance):
        """Order ``blocks`` stages; the next state of the pipelines."""
        config = self.config
        stage, phase = (cute.arch.make_warp_uniform(each) for each in state[:2])
        for _ in range(blocks):
            cute.arch.mbarrier_wait(self.full + stage, phase)
            for row in range_constexpr(0, config.tile[0], 32):
                self.order(stage * (config.tile[0] * 256) + row * 128)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            widened_ptx.arrive_once((self.ordered + stage).toint())
            stage, phase = advance(stage, phase, config.stages)
        return stage, phase, Int32(0), Int32(0)

    def order(self, offset) -> None:
        """Rows of a warp, so many bytes after the first ones."""
        source, target = self.source + offset, self.target + offset
        tile = self.config.tile[0] * 128
        blocks = [
            widened_ptx.load_words(source ^ (64 * (i % 2)), i // 2 * tile, 4) for i in range(4)
        ]
        cute.arch.sync_warp()  # all of the rows is in registers
        for i in range(4):
            widened_ptx.store_words(target ^ (16 * i), [words[i] for words in blocks])
