"""ScaledTensors as the shards of a DTensor: torch's collectives move elements and scales.

Importing this fills the table of operations. What is gathered is the bytes of the whole tensor
quantized at once, where shards are whole blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives  # noqa: F401 (defines some operations)

from ..tensor import RULES, ScaledTensor
from ..tensor_rules import slice_of
from .collectives import all_gather, exchange, parts_of
from .functional_collectives import group_of

__all__: list[str] = []

functional, c10d = torch.ops._c10d_functional, torch.ops.c10d


def _all_gather(q: ScaledTensor, ranks: int, group: Any) -> ScaledTensor:
    return all_gather(q, 0, _group_of(group))


def _wait(q: ScaledTensor) -> ScaledTensor:
    return q  # it has been waited for


def _alltoall(q: ScaledTensor, gather_dim: int, shard_dim: int, group: Any) -> ScaledTensor:
    """From shards along ``gather_dim`` to shards along ``shard_dim``."""
    known = _group_of(group)
    size = q.shape[shard_dim] // dist.get_world_size(known)
    starts = range(0, q.shape[shard_dim], size)
    parts = [slice_of(q, shard_dim, start, start + size) for start in starts]
    return exchange(parts, gather_dim, known)


def _scatter(outputs: list[ScaledTensor], inputs: list[list[ScaledTensor]], *how: Any) -> Any:
    """``inputs``: at the root those for each rank, elsewhere nothing."""
    sources = [parts_of(x) for each in inputs for x in each]
    for i, part in enumerate(parts_of(outputs[0])):
        of = [[_dense(source[i]) for source in sources]] if sources else []
        received = _dense(torch.empty_like(part, memory_format=torch.contiguous_format))
        _, work = _awaitable(c10d.scatter_.default, [received], of, *how)
        work.wait()
        part.copy_(received.view(part.dtype))
    return outputs, work


def _broadcast(tensors: list[ScaledTensor], *how: Any) -> Any:
    for part in parts_of(tensors[0]):
        sent = _dense(part)
        _, work = _awaitable(c10d.broadcast_.default, [sent], *how)
        work.wait()
        part.copy_(sent.view(part.dtype))
    return tensors, work


def _awaitable(op: Any, *given: Any) -> Any:
    """What the operation gives, and what to wait for: NCCL gives nothing that can be waited for
    where a call was not asynchronous."""
    arguments = op._schema.arguments
    asynchronous = {each.name: True for each in arguments if str(each.type) == "bool"}
    named = {each.name: x for each, x in zip(arguments, given, strict=False)}
    return op(**{**named, **asynchronous})


def _dense(part: Tensor) -> Tensor:
    """In memory as a backend takes it, as bytes where it knows no other such type."""
    part = part.contiguous()
    return part.view(torch.uint8) if part.element_size() == 1 else part


def _group_of(group: str | dist.ProcessGroup) -> dist.ProcessGroup:
    """torch's ops have one or its name."""
    return group_of(group) if isinstance(group, str) else group


RULES.update(
    {
        functional.all_gather_into_tensor.default: _all_gather,
        functional.wait_tensor.default: _wait,
        torch.ops._dtensor.shard_dim_alltoall.default: _alltoall,
        c10d.scatter_.default: _scatter,
        c10d.broadcast_.default: _broadcast,
    }
)
if hasattr(functional, "_wrap_tensor_autograd"):  # since torch 2.13
    RULES[functional._wrap_tensor_autograd.default] = _wait
