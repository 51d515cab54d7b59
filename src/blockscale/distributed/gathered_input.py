"""Activations whose shards ranks gather quantized, as the layers that read them do: rows in the
forward, columns in the backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..nn.double_backward import refuse_double_backward
from .functional_collectives import all_reduce, local_shard, reduce_scatter_tensor
from .shards import Shards

__all__ = ["NO_WRITES", "GatheredInput", "gather_input", "reduce_output", "replicate_input"]


NO_WRITES = (
    "an input that ranks gather for their layers cannot be written to; call the operation that "
    "makes a new tensor, or take a copy by x.clone()"
)


class GatheredInput(Tensor):
    """The activations (..., S, H) of all ranks, of which this one has a shard. Layers over ranks
    read them quantized, and have partial gradients of them; whatever else does gets a plain tensor,
    gathered as it is each time, whose gradient all ranks have alike. Nobody writes to it.

    Attributes:
        partial: the same to layers over ranks, whose gradients are summed over them.
    """

    shards: Shards
    partial: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shards: Shards) -> GatheredInput:
        x = shards.x
        self: Any = Tensor._make_wrapper_subclass(
            cls, shards.place.whole, dtype=x.dtype, device=x.device, requires_grad=False
        )
        self.shards, self.partial = shards, self
        found: GatheredInput = self
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        ranks = self.shards.place.ranks
        return f"GatheredInput({tuple(self.shape)}, {self.dtype}, from {ranks} ranks)"

    def __setitem__(self, *args: Any) -> None:
        raise ValueError(f"__setitem__: {NO_WRITES}")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable:
            raise ValueError(f"{func}: {NO_WRITES}")
        plain = tree_map_only(GatheredInput, lambda x: x.shards.plain(), (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class _GatherInput(torch.autograd.Function):
    """Two of one input, as their gradients differ: alike on all ranks, and parts of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        shards = Shards(x.detach(), dim, group)
        ctx.kept, ctx.dim, ctx.group = shards.kept, dim, group
        ctx.set_materialize_grads(False)
        return GatheredInput(shards), GatheredInput(shards)

    @staticmethod
    def backward(ctx: Any, alike: Tensor | None, partial: Tensor | None) -> Any:
        for each in ctx.kept.values():
            each.forget()  # all layers have read it
        found = None if partial is None else reduce_scatter_tensor(partial, ctx.dim, ctx.group)
        if alike is not None:
            here = local_shard(alike, ctx.dim, ctx.group)
            found = here if found is None else found + here
        return found, None, None


class _ReplicateInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (found,) = refuse_double_backward((all_reduce(grad, "sum", ctx.group),), grad)
        return found, None


class _ReduceOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, bias: Tensor | None, dim: int | None, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.bias_dtype = dim, group, None if bias is None else bias.dtype
        found = all_reduce(y, "sum", group) if dim is None else reduce_scatter_tensor(y, dim, group)
        return found if bias is None else found + bias.to(found.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bias = None
        if ctx.needs_input_grad[1]:
            bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32)
            if ctx.dim is not None:
                bias = all_reduce(bias, "sum", ctx.group)
            bias = bias.to(ctx.bias_dtype)
        if ctx.dim is not None:
            grad = GatheredInput(Shards(grad, ctx.dim, ctx.group))
        return grad, bias, None, None


def gather_input(x: Tensor, dim: int, group: dist.ProcessGroup) -> GatheredInput:
    """Shards ``x`` (..., s, H) of all ranks along ``dim`` as one; its gradient is summed and
    scattered. (Megatron: gather_from_sequence_parallel_region.)"""
    found, partial = _GatherInput.apply(x, dim, group)
    found.partial = partial
    made: GatheredInput = found
    return made


def replicate_input(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x``, which all ranks have; its gradient is summed over them. (Megatron:
    copy_to_tensor_model_parallel_region.)"""
    found: Tensor = _ReplicateInput.apply(x, group)
    return found


def reduce_output(
    y: Tensor, bias: Tensor | None, dim: int | None, group: dist.ProcessGroup
) -> Tensor:
    """The sum of all ranks' ``y``, and ``bias`` once: of each rank a shard along ``dim``, or the
    whole. A gradient that comes as shards is gathered quantized, by rows and by columns. (Megatron:
    reduce_scatter_to_sequence_parallel_region, reduce_from_tensor_model_parallel_region.)"""
    found: Tensor = _ReduceOutput.apply(y, bias, dim, group)
    return found
