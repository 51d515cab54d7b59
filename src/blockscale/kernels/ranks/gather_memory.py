"""The memory in which ranks bring the shards of a matrix together, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .gather_sizes import MISSING, WORDS, GatherSizes

__all__ = ["GatherMemory"]


@dataclass(frozen=True, slots=True)
class GatherMemory:
    """Of one rank.

    Attributes:
        buffer: this rank's, bytes that were zeros before :meth:`prepare`.
        peers: int64 (ranks,), where in this rank's address space the buffers of all are.
        rank: this one.
    """

    buffer: Tensor
    peers: Tensor
    rank: int

    @property
    def ranks(self) -> int:
        return len(self.peers)

    def prepare(self) -> None:
        """Before the first launch of any rank."""
        self.buffer[GatherSizes.nan()].view(torch.float32).fill_(torch.nan)

    @property
    def start(self) -> Tensor:
        """What tells a kernel where the buffer is: it may have more bytes than an int32 counts."""
        return self.buffer[:128]

    @property
    def signals(self) -> Tensor:
        return self.buffer[: 4 * WORDS].view(torch.int32)

    def data(self, sizes: GatherSizes) -> Tensor:
        """Rows of all ranks, (ranks * rows, K)."""
        return self.buffer[sizes.data].view(sizes.whole_rows, -1)

    def scale(self, sizes: GatherSizes) -> Tensor:
        """(1 + K / 128, ranks * rows) fp32: a row of NaN, then scales."""
        return self.buffer[sizes.scale].view(torch.float32).view(-1, sizes.whole_rows)

    @property
    def missing(self) -> Tensor:
        """(1,) int32: 1 + the rank that a launch waited for in vain, or 0."""
        return self.signals[MISSING : MISSING + 1]
