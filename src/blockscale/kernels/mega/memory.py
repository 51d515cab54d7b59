"""What a launch of a mega MoE is given: the memory of a rank as tensors, and its experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.calls import Alpha, Operand
from ..common.gpu import Unsupported
from ..common.runtime import FLOATS
from .buffers import Buffers

__all__ = ["Experts", "Launch", "Memory", "require_kernel"]


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


def require_kernel(reason: str, out: torch.dtype) -> None:
    """Raise Unsupported where there is a ``reason`` why there is no kernel, or none has the dtype
    of ``out``."""
    if not reason and out not in FLOATS:
        reason = f"dtype {out}: kernels have {', '.join(map(str, FLOATS))}"
    if reason:
        raise Unsupported(reason)
