"""What lies where in the memory that ranks share: a pure function of sizes.

Each rank has one such buffer, in which the others write. docs/reference/mega_moe.md has the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ...dtypes import BFLOAT16, UINT8
from ...formats import get_format

__all__ = [
    "LEAST_UNIT",
    "MULTIPLE",
    "TILE_ROWS",
    "Buffers",
    "Region",
    "Sizes",
    "needs_bf16_rings",
    "why_not_sizes",
]

MULTIPLE = 128  # of hidden and intermediate sizes
MOST_RANKS = 128  # a thread tells each
MOST_EXPERTS = 1024  # of all ranks: shared memory has four words of each
TILE_ROWS = 128  # rows of a block: of a tile of scales
LEAST_UNIT = 32  # rows of a unit of work, at least
_ALIGNMENT = 128  # bytes; TMA wants 16
_INT32, _BYTE, _BF16 = np.dtype(np.int32), UINT8, BFLOAT16


@dataclass(frozen=True, slots=True)
class Sizes:
    """What all ranks have alike.

    Attributes:
        ranks: how many there are.
        tokens: the most that a rank has in a launch.
        topk: experts of a token.
        hidden, intermediate: H and I.
        experts: of each rank.
        activations: the format of tokens, and of what the second product reads.
        ring_blocks: blocks of 128 rows that each of the two rings holds.
        bf16_rings: elements in the rings are bfloat16, which products of mixed inputs take; else
            those of ``activations``.
    """

    ranks: int
    tokens: int
    topk: int
    hidden: int
    intermediate: int
    experts: int
    activations: str
    ring_blocks: int = 32
    bf16_rings: bool = False

    @property
    def ring_rows(self) -> int:
        return self.ring_blocks * TILE_ROWS

    @property
    def pairs(self) -> int:
        """Tokens and experts of theirs, of a rank."""
        return self.tokens * self.topk

    @property
    def every(self) -> int:
        """The experts of all ranks."""
        return self.ranks * self.experts

    @property
    def sort_words(self) -> int:
        """Words of shared memory to sort pairs in: two bins of each expert, where each begins, and
        the end."""
        return 2 * (2 * self.every) + 1

    def row_bytes(self, columns: int) -> int:
        """How many bytes a row of activations has."""
        return columns * get_format(self.activations).element.bits // 8

    def ring_bytes(self, columns: int) -> int:
        """How many bytes the same row has in a ring."""
        return 2 * columns if self.bf16_rings else self.row_bytes(columns)

    def scale_words(self, columns: int) -> int:
        """Words of 4 bytes that hold the block scales of a row."""
        format = get_format(self.activations)
        return -(-columns // format.block[1]) * format.scale.nbytes // 4


def needs_bf16_rings(activations: str, weights: str) -> bool:
    """Whether products widen matrices to bfloat16: FP8 by elements of four bits, which Hopper's
    tensor cores do not take."""
    return activations == "fp8_1x128" and get_format(weights).element.bits == 4


def why_not_sizes(sizes: Sizes) -> str:
    """Why no kernel takes them; empty where one may."""
    for name in ("hidden", "intermediate"):
        if getattr(sizes, name) % MULTIPLE:
            return (
                f"{name} size {getattr(sizes, name)}: tiles and their scales want a multiple of "
                f"{MULTIPLE}: pad the weights with zeros"
            )
    if sizes.ranks > MOST_RANKS:
        return f"{sizes.ranks} ranks: kernels know {MOST_RANKS} at most"
    if sizes.every > MOST_EXPERTS:
        return f"{sizes.every} experts of all ranks: kernels sort {MOST_EXPERTS} at most"
    return ""


class Region(NamedTuple):
    """A part of the buffer: a C-contiguous array that begins ``offset`` bytes after its start."""

    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]
    use: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffer of a rank.

    >>> Buffers(Sizes(8, 8192, 6, 4096, 2048, 32, "mxfp8")).nbytes >> 20
    675
    """

    sizes: Sizes

    @property
    def signals(self) -> Mapping[str, tuple[int, int]]:
        """Of a set of counters: where each begins, in words of 4 bytes, and how many there are.
        A launch counts in one set and clears the other one."""
        s, units = self.sizes, self.sizes.ring_rows // LEAST_UNIT
        counts = {
            "finished": s.ranks,  # warps of each rank that have sent all results
            "sorted": s.ranks,  # CTAs of each rank that have sent what travels beside tokens
            "arrived": s.ranks * s.experts,  # rows from each rank that precede an expert's end
            "bins": 2 * s.every,  # this rank's pairs of each expert: those whose rows travel first
            "grid": 1,  # CTAs that have counted their pairs
            "tiles": 1,  # that CTAs have taken after their first
            "go": 1,  # 1: all ranks have sent; 2: one has not
            "up_full": units,  # rows of a unit of the first ring that are there
            "up_done": units,  # tiles that have read them
            "down_full": units,  # warps that have stored what the second product reads of a unit
            "down_done": units,  # tiles that have read it
        }
        found, at = {}, 0
        for name, count in counts.items():
            found[name] = at, count
            at += count
        return MappingProxyType(found)

    @property
    def set_words(self) -> int:
        """Words of a set of counters."""
        at, count = list(self.signals.values())[-1]
        return -(-(at + count) // 32) * 32

    @property
    def regions(self) -> Mapping[str, Region]:
        """By name, in their order in memory."""
        return _regions(self)

    @property
    def nbytes(self) -> int:
        last = list(self.regions.values())[-1]
        return last.offset + -(-last.nbytes // _ALIGNMENT) * _ALIGNMENT

    def _parts(self) -> Iterator[tuple[str, np.dtype, tuple[int, ...], str]]:
        s = self.sizes
        rows = s.ranks * s.tokens
        padded = -(-s.experts // 32) * 32
        yield "state", _INT32, (32,), "which set of counters is next; 1 + the rank that is missing"
        yield "signals", _INT32, (2, self.set_words), "counters"
        counts = s.ranks, s.experts, 4
        yield "counts", _INT32, counts, "by source and expert: first pair, rows that travel, pairs"
        yield "pairs", _INT32, (s.ranks, s.pairs), "by source: pairs of this rank's experts"
        yield "sends", _INT32, (s.pairs,), "this rank's pairs by expert"
        yield "totals", _INT32, (padded,), "pairs of each expert"
        yield "origins", _INT32, (rows * s.topk,), "source and pair of each row of experts"
        yield "x", _BYTE, (rows, s.row_bytes(s.hidden)), "tokens of all ranks, a rank after another"
        yield "x_scale", _INT32, (rows, s.scale_words(s.hidden)), "their block scales"
        yield "results", _BF16, (s.pairs, s.hidden), "what comes back of each pair"
        for name, columns, use in (
            ("up", s.hidden, "rows that the first product reads"),
            ("down", s.intermediate, "and the second one"),
        ):
            yield f"{name}_ring", _BYTE, (s.ring_rows, s.ring_bytes(columns)), use
            shape = s.ring_blocks, s.scale_words(columns), TILE_ROWS
            yield f"{name}_ring_scale", _INT32, shape, "tiles of their scales"


@lru_cache(maxsize=256)  # a launch asks for many of them
def _regions(buffers: Buffers) -> Mapping[str, Region]:
    found, at = {}, 0
    for name, dtype, shape, use in buffers._parts():
        found[name] = Region(at, dtype, shape, use)
        at += -(-found[name].nbytes // _ALIGNMENT) * _ALIGNMENT
    return MappingProxyType(found)
