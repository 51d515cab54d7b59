# mypy: ignore-errors
"""What warps do to bring A, and MXFP4 as E4M3, to the stages of a product (``upcast_gemm``).

A warp loads A, another one B as it is in memory, to slots of its own; a warpgroup takes these, and
writes E4M3 to the stages. All of them follow the list of K blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
from cutlass import Int32, cute, range_constexpr

from ..common.copies import TmaTiles
from ..common.pipeline import Pipeline
from ..common.ptx import store_shared
from . import ptx
from .config import BLOCK_K
from .dense_scheduler import DenseTiles
from .k_blocks import LAST, NORMAL, KBlocks, exponent_of, k_block_of
from .kernel import Operand
from .upcast_config import B_ROWS, SCALE_WORDS, UpcastConfig
from .upcast_ptx import bases, byte_of_word, codes, codes_of_normal, upcast

__all__ = ["ALoader", "BLoader", "RawB", "Upcaster"]

_ROWS = 32  # of B, that the threads of a warpgroup have at once: four have the elements of one


@dataclass(frozen=True)
class RawB:
    """Slots of B as it is in memory.

    Attributes:
        pipeline: of them.
        data: tiles (128, 64 bytes).
        scales: words of 128 x 128 elements.
    """

    pipeline: Pipeline
    data: TmaTiles
    scales: TmaTiles

    @property
    def loads(self) -> tuple:
        return self.data, self.scales


@dataclass(frozen=True)
class ALoader:
    """Loads A and its scales, and tells the factor of B, at ``factor``: negative in the last K
    block of a tile."""

    pipeline: Pipeline
    schedule: DenseTiles
    k_blocks: KBlocks
    operands: tuple[Operand, ...]
    loads: list[TmaTiles]
    factor: Any

    @cute.jit
    def __call__(self):
        self.k_blocks.follow(self.schedule, self.load, (Int32(0), Int32(1)))

    @cute.jit
    def load(self, tile, entry, state):
        (stage, phase), lane = state, cute.arch.lane_idx()
        factor = _power_of_two(exponent_of(entry)) | entry & LAST
        self.pipeline.producer_acquire(stage, phase)
        barrier = self.pipeline.producer_barrier(stage, phase)
        if lane == 0:
            store_shared(self.factor + stage * 16, [factor], 4)
            nbytes = sum(each.copies.moved for each in self.loads)
            ptx.mbarrier_arrive_expect_tx(barrier.toint(), nbytes)
        for operand, load in zip(self.operands, self.loads, strict=True):
            load.load(stage, operand.origin(tile, k_block_of(entry)), barrier)
        return self.pipeline.producer_next(stage, phase)


@dataclass(frozen=True)
class BLoader:
    """Loads B as it is in memory, and its scales, to slots."""

    schedule: DenseTiles
    k_blocks: KBlocks
    raw: RawB

    @cute.jit
    def __call__(self):
        self.k_blocks.follow(self.schedule, self.load, (Int32(0), Int32(1)))

    @cute.jit
    def load(self, tile, entry, state):
        raw, (slot, phase), k_block = self.raw, state, k_block_of(entry)
        raw.pipeline.producer_acquire(slot, phase)
        barrier = raw.pipeline.producer_barrier(slot, phase)
        if cute.arch.lane_idx() == 0:
            nbytes = sum(each.copies.moved for each in raw.loads)
            ptx.mbarrier_arrive_expect_tx(barrier.toint(), nbytes)
        raw.data.load(slot, (tile.b_row, k_block * (BLOCK_K // 2)), barrier)
        place = self.k_blocks.index(tile), k_block * SCALE_WORDS
        raw.scales.load(slot, place, barrier)
        return raw.pipeline.producer_next(slot, phase)


@dataclass(frozen=True)
class Upcaster:
    """Makes tiles of E4M3, at ``address``, of what is in the slots: a warpgroup.

    A thread has 32 elements, which share a scale, of every 32nd row.
    """

    config: UpcastConfig
    pipeline: Pipeline
    schedule: DenseTiles
    k_blocks: KBlocks
    raw: RawB
    address: Any

    @property
    def thread(self):
        return cute.arch.thread_idx()[0] - (self.config.threads - 128)

    @cute.jit
    def __call__(self):
        raw, thread = self.raw, self.thread
        row, part = thread // 4, thread % 4
        places = [
            self.address + row * BLOCK_K + ((2 * part + half) ^ row % 8) * 16 for half in (0, 1)
        ]
        own = (
            places,
            raw.data.address + thread * 16,
            raw.scales.address + row * 16,
            byte_of_word(part),
        )
        tables = cute.make_rmem_tensor((2 * (B_ROWS // _ROWS),), Int32)
        state = Int32(0), Int32(1), Int32(0), Int32(0)
        self.k_blocks.follow(self.schedule, partial(self.upcast, own, tables), state)

    @cute.jit
    def upcast(self, own, tables, tile, entry, state):
        """A K block, of which a thread's ``own`` are: where it puts half of 32 elements of a row,
        where data and scales are, and which of four scales."""
        raw, (places, data, scales, byte) = self.raw, own
        stage, phase, slot, raw_phase = state
        raw.pipeline.consumer_wait(slot, raw_phase)
        words = [
            ptx.ld_shared(data + slot * raw.data.copies.nbytes, i * _ROWS * 64, 4, Int32)
            for i in range(B_ROWS // _ROWS)
        ]
        found = ptx.ld_shared(scales + slot * raw.scales.copies.nbytes, 0, 4, Int32)
        self.look_up(tables, found, byte, entry)
        self.pipeline.producer_acquire(stage, phase)
        targets = [place + stage * (B_ROWS * BLOCK_K) for place in places]
        for i in range_constexpr(B_ROWS // _ROWS):
            table = tables[2 * i], tables[2 * i + 1]
            for half in range_constexpr(2):
                made = upcast(words[i][2 * half], table)
                made += upcast(words[i][2 * half + 1], table)
                ptx.st_shared(targets[half], made, i * _ROWS * BLOCK_K)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if self.thread % 32 == 0:
            ptx.mbarrier_arrive(self.pipeline.producer_barrier(stage, phase).toint())
            ptx.mbarrier_arrive((raw.pipeline.empty + slot).toint())
        stage, phase = self.pipeline.producer_next(stage, phase)
        slot, raw_phase = raw.pipeline.consumer_next(slot, raw_phase)
        return stage, phase, slot, raw_phase

    @cute.jit
    def look_up(self, tables, scales: list, byte, entry):
        """The codes of eight magnitudes by each of a thread's four scales."""
        exponent = exponent_of(entry)
        if entry & NORMAL != 0:
            added = bases(exponent)
            for i in range_constexpr(len(scales)):
                tables[2 * i], tables[2 * i + 1] = codes_of_normal(scales[i], byte, added)
        else:
            for i in range_constexpr(len(scales)):
                tables[2 * i], tables[2 * i + 1] = codes(scales[i], byte, exponent)


def _power_of_two(exponent):
    """2^(exponent - 127) as fp32, which may be subnormal."""
    subnormal = 1 << cutlass.min(22 + exponent, Int32(22))
    return Int32(cutlass.select_(exponent > 0, exponent << 23, subnormal))
