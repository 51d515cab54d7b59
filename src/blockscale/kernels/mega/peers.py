# mypy: ignore-errors
"""This rank's place among ranks: where everything is, in its own memory and in that of others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ..common import ptx
from ..common.numeric import NUMERIC
from ..common.tensor_specs import any_tensor
from ..ranks.rows import memory_of
from ..ranks.signals import load_acquire
from .buffers import Buffers

__all__ = ["GO", "MISSING", "Peers", "any_arguments"]

GO, MISSING = 1, 2  # of the signal "go"
_WORD = 4  # bytes


@dataclass(frozen=True)
class Peers:
    """What the roles of a CTA know of ranks.

    Attributes:
        base: the address of this rank's buffer.
        table: the address of the addresses of all, 8 bytes each.
        rank: this one.
        set: which set of counters the launch has, 0 or 1.
        limit: nanoseconds to wait for another rank.
        cta, ctas: this CTA's number, and how many a rank has.
    """

    buffers: Buffers
    base: Any
    table: Any
    rank: Any
    set: Any
    limit: Any
    cta: Any
    ctas: Any

    @classmethod
    def of_launch(cls, buffers: Buffers, buffer, table, rank, limit) -> Peers:
        """What the CTA that runs knows; ``buffer`` and ``table`` are tensors."""
        base, table = buffer.iterator.toint(), table.iterator.toint()
        which = Int32(ptx.load_global(base + buffers.regions["state"].offset, 4))
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        return cls(buffers, base, table, rank, which, limit, cta, ctas)

    @property
    def sizes(self):
        return self.buffers.sizes

    def address(self, region: str):
        """Where a region of this rank begins."""
        return self.base + self.buffers.regions[region].offset

    def of(self, rank):
        """The address of a rank's buffer."""
        return memory_of(self.table, rank)

    def of_peer(self, rank, region: str):
        """The address of a region of another rank."""
        return self.of(rank) + self.buffers.regions[region].offset

    def signal(self, name: str, index=0, rank=None):
        """The address of a counter of this launch, of this rank or of another one."""
        start = self.address("signals") if rank is None else self.of_peer(rank, "signals")
        at = self.set * self.buffers.set_words + self.buffers.signals[name][0]
        return start + Int64(at + index) * _WORD

    def word(self, region: str, index):
        """A word of a region."""
        return Int32(ptx.load_global(self.address(region) + Int64(index) * _WORD, 4))

    def count(self, source, expert, what: int):
        """Of a source's pairs of an expert: 0, where they begin; 1, how many rows travel for it;
        2, how many there are."""
        return self.word("counts", (source * self.sizes.experts + expert) * 4 + what)

    @cute.jit
    def await_go(self):
        """Until it is known whether all ranks have sent what is before rows: GO, or MISSING."""
        go = load_acquire(self.signal("go"), "gpu")
        while go == 0:
            go = load_acquire(self.signal("go"), "gpu")
        return go

    @property
    def status(self):
        """The address of what says which rank is missing."""
        return self.address("state") + _WORD


def any_arguments(config) -> list:
    """What kernels are compiled for of ranks and their tokens: the start of the buffer, the
    addresses of all, this rank; expert numbers, weights, and results."""
    return [
        any_tensor(cutlass.Uint8, 1, 16),
        any_tensor(Int64, 1, 8),
        Int32(0),
        any_tensor(Int32 if config.id_bytes == 4 else Int64, 2, config.id_bytes),
        any_tensor(Float32, 2, 4),
        any_tensor(NUMERIC[config.out_dtype], 2, 16),
    ]
