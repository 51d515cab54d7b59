"""Memory of each rank that all others reach."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .ranks import rank_and_ranks

__all__ = ["symmetric_memory"]


def symmetric_memory(
    nbytes: int, device: torch.device, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Bytes of this rank, zeros, and int64 (ranks,), where those of all ranks are in its address
    space. All ranks call it. RuntimeError where GPUs do not reach each other.

    Between processes it is torch's symmetric memory, of which neither multicast nor signals are
    used.
    """
    ranks = rank_and_ranks(group)[1]
    if ranks == 1:
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return buffer, torch.tensor([buffer.data_ptr()], device=device)
    from torch.distributed import (
        _symmetric_memory as symmetric,  # private: who shares none needs none
    )

    try:
        buffer = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        known: Any = group or dist.group.WORLD
        handle = symmetric.rendezvous(buffer, known)
    except RuntimeError as error:
        raise RuntimeError(
            f"group: its GPUs do not reach each other's memory ({error}); let the steps run one "
            'after another by backend="steps"'
        ) from error
    buffer.zero_()
    handle.barrier()  # zeros before anybody writes
    return buffer, torch.tensor(handle.buffer_ptrs, device=device)
