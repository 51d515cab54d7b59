"""What a launch of a mega MoE is given: the memory of a rank as tensors, and its experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.calls import Alpha, Operand
from .buffers import Buffers, Sizes

__all__ = ["MULTIPLE", "Experts", "Launch", "Memory", "why_not_sizes"]

MULTIPLE = 128  # of hidden and intermediate sizes
MOST_RANKS = 128  # a thread tells each
MOST_EXPERTS = 1024  # of which shared memory has four words each


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


class Experts(NamedTuple):
    """A rank's matrices, as its kernels take them.

    Attributes:
        up: data (experts, 2 * I, columns), gate's rows first, and scales.
        down: (experts, H, columns), likewise.
        up_alpha, down_alpha: what accumulators of both products are multiplied by.
        global_scale: () fp32, of what the second product reads, for "nvfp4" alone.
    """

    up: Operand
    down: Operand
    up_alpha: Alpha = None
    down_alpha: Alpha = None
    global_scale: Tensor | None = None


class Launch(NamedTuple):
    """How a kernel is launched.

    Attributes:
        limit: seconds to wait for another rank; ``Memory.missing_rank`` tells.
        ctas: of a cluster, where it is given.
        clusters: how many there are; all run at once. 0: as many as the GPU has room for.
    """

    limit: float = 100.0
    ctas: int | None = None
    clusters: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """What a rank's kernel is given of the memory that ranks share.

    Attributes:
        buffer: this rank's, bytes that were zeros before the first launch.
        peers: int64 (ranks,), where in this rank's address space the buffers of all are.
        rank: this one.
    """

    buffers: Buffers
    buffer: Tensor
    peers: Tensor
    rank: int

    @property
    def start(self) -> Tensor:
        """What tells a kernel where the buffer is: it may have more bytes than an int32 counts."""
        return self.buffer[:128]

    def region(self, name: str, dtype: torch.dtype = torch.uint8) -> Tensor:
        """A part of this rank's buffer, as it is, or its memory as another type's."""
        part = self.buffers.regions[name]
        flat = self.buffer[part.offset : part.offset + part.nbytes]
        rows = part.shape[0]
        return flat.view(dtype).view(rows, -1)

    def put_tokens(self, data: Tensor, scale: Tensor) -> None:
        """Set this rank's tokens: quantized rows, and their block scales in layout "compact"."""
        first, sizes = self.rank * self.buffers.sizes.tokens, self.buffers.sizes
        for name, values in (("x", data), ("x_scale", scale)):
            if len(values) > sizes.tokens:
                raise ValueError(
                    f"{name}: has {len(values)} rows; there is room for {sizes.tokens}"
                )
            octets = values.view(torch.uint8)
            self.region(name)[first : first + len(values), : octets.shape[1]] = octets

    @property
    def missing_rank(self) -> int | None:
        """The rank that a launch waited for in vain; waits for the device."""
        found = int(self.region("state", torch.int32).flatten()[1])
        return found - 1 if found else None
