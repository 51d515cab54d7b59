"""Collectives of plain tensors along any dimension, as ops that compilers call as they are.

Names are of torch.distributed._functional_collectives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ..ops.operation import operation

__all__ = [
    "all_gather_tensor",
    "all_reduce",
    "group_of",
    "local_shard",
    "name_of",
    "reduce_scatter_tensor",
]

#: Their names before torch 2.13, and since.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]


def name_of(group: dist.ProcessGroup | None) -> str:
    """Return the name by which graphs know a group."""
    known: Any = dist.group.WORLD if group is None else group
    found: str = known.group_name
    return found


def group_of(name: str) -> dist.ProcessGroup:
    """The group of this name."""
    found: dist.ProcessGroup = _resolve(name)
    return found


def _fake_gather(x: Tensor, dim: int, ranks: int) -> Tensor:
    return x.new_empty([*x.shape[:dim], ranks * x.shape[dim], *x.shape[dim + 1 :]])


@operation(_fake_gather)
def gather_shards(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    """The shards of so many ranks, joined along ``dim``."""
    x = x.contiguous()
    received = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    _gather(received, x, group_of(group))
    if dim == 0:
        return received
    return received.unflatten(0, (ranks, -1)).movedim(0, dim).flatten(dim, dim + 1)


def _fake_scatter(x: Tensor, dim: int, ranks: int) -> Tensor:
    return x.new_empty([*x.shape[:dim], x.shape[dim] // ranks, *x.shape[dim + 1 :]])


@operation(_fake_scatter)
def scatter_sum(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    """This rank's shard, along ``dim``, of the sum over so many ranks."""
    if dim:
        x = x.unflatten(dim, (ranks, -1)).movedim(dim, 0).flatten(0, 1)
    x = x.contiguous()
    found = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
    _reduce_scatter(found, x, group=group_of(group))
    return found


@operation(_fake_scatter)
def take_shard(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    """This rank's shard of what all of so many have. Nothing travels; it is an op as graphs are
    alike on all ranks."""
    size = x.shape[dim] // ranks
    mine = x.narrow(dim, dist.get_rank(group_of(group)) * size, size)
    return mine.clone(memory_format=torch.contiguous_format)


def _fake_reduce(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@operation(_fake_reduce)
def reduce_over_ranks(x: Tensor, how: str, group: str) -> Tensor:
    """The "sum", or the "max"imum, of what ranks have."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, getattr(dist.ReduceOp, how.upper()), group_of(group))
    return x


def all_gather_tensor(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """The shards of all ranks, joined along ``dim``."""
    return gather_shards(x, dim, dist.get_world_size(group), name_of(group))


def reduce_scatter_tensor(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's shard, along ``dim``, of the sum over ranks."""
    return scatter_sum(x, dim, dist.get_world_size(group), name_of(group))


def local_shard(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's shard, along ``dim``, of what all ranks have."""
    return take_shard(x, dim, dist.get_world_size(group), name_of(group))


def all_reduce(x: Tensor, how: str, group: dist.ProcessGroup) -> Tensor:
    """The "sum" over ranks, or the "max"imum, of each element."""
    return reduce_over_ranks(x, how, name_of(group))
