"""Activations whose shards ranks gather quantized, as the layers that read them do: rows in the
forward, columns in the backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..nn.forms import Forms
from .plain import scattered_sum, summed
from .shards import How, Shards

__all__ = ["GatheredInput", "gather_input", "reduce_output", "replicate_input"]


class GatheredInput(Tensor):
    """The activations (..., S, H) of all ranks, of which this one has a shard. Layers over ranks
    read them quantized; whatever else does gets them gathered as they are, each time."""

    shards: Shards
    _rows: dict[How, Forms]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shards: Shards) -> GatheredInput:
        x = shards.x
        self: Any = Tensor._make_wrapper_subclass(
            cls, shards.shape, dtype=x.dtype, device=x.device, requires_grad=False
        )
        self.shards, self._rows = shards, {}
        found: GatheredInput = self
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        ranks = self.shards.ranks
        return f"GatheredInput({tuple(self.shape)}, {self.dtype}, from {ranks} ranks)"

    def rows(self, how: How) -> Forms:
        """Kept: layers that share an input read it one after another."""
        if how not in self._rows:
            self._rows[how] = self.shards.forms(how, rows=True)
        return self._rows[how]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return _with_rows(args[0])
        plain = tree_map_only(GatheredInput, lambda x: x.shards.plain(), (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def _with_rows(x: GatheredInput) -> GatheredInput:
    made = GatheredInput(x.shards)
    made._rows = x._rows
    return made


class _GatherInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.shards = Shards(x.detach(), dim, group)
        return GatheredInput(ctx.shards)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.shards.forget()  # all layers have read it
        return scattered_sum(grad, ctx.shards.dim, ctx.shards.group), None, None


class _ReplicateInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None


class _ReduceOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, bias: Tensor | None, dim: int | None, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.bias_dtype = dim, group, None if bias is None else bias.dtype
        found = summed(y, group) if dim is None else scattered_sum(y, dim, group)
        return found if bias is None else found + bias.to(found.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bias = None
        if ctx.needs_input_grad[1]:
            bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32)
            bias = (bias if ctx.dim is None else summed(bias, ctx.group)).to(ctx.bias_dtype)
        if ctx.dim is not None:
            grad = GatheredInput(Shards(grad, ctx.dim, ctx.group))
        return grad, bias, None, None


def gather_input(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Shards ``x`` (..., s, H) of all ranks along ``dim`` as one; its gradient is summed and
    scattered."""
    found: Tensor = _GatherInput.apply(x, dim, group)
    return found


def replicate_input(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x``, which all ranks have; its gradient is summed over them."""
    found: Tensor = _ReplicateInput.apply(x, group)
    return found


def reduce_output(
    y: Tensor, bias: Tensor | None, dim: int | None, group: dist.ProcessGroup
) -> Tensor:
    """The sum of all ranks' ``y``, and ``bias`` once: of each rank a shard along ``dim``, or the
    whole. A gradient that comes as shards is gathered quantized, by rows and by columns."""
    found: Tensor = _ReduceOutput.apply(y, bias, dim, group)
    return found
