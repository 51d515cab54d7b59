"""Collectives of plain tensors along any dimension."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["gathered", "scattered_sum", "summed"]

#: Their names before torch 2.13, and since.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gathered(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """The shards of all ranks, joined along ``dim``."""
    ranks, x = dist.get_world_size(group), x.contiguous()
    received = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    _gather(received, x, group)
    if dim == 0:
        return received
    return received.unflatten(0, (ranks, -1)).movedim(0, dim).flatten(dim, dim + 1)


def scattered_sum(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's shard, along ``dim``, of the sum over ranks."""
    ranks = dist.get_world_size(group)
    if dim:
        x = x.unflatten(dim, (ranks, -1)).movedim(dim, 0).flatten(0, 1)
    x = x.contiguous()
    found = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
    _reduce_scatter(found, x, group=group)
    return found


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x
