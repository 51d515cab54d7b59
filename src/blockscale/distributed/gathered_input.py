"""Activations whose shards ranks gather quantized, as the layers that read them do: rows in the
forward, columns in the backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..tensor import ScaledTensor
from .plain import scattered_sum, summed
from .shards import How, Shards

__all__ = ["GatheredInput", "gather_input", "reduce_output", "replicate_input"]


class GatheredInput(Tensor):
    """The activations (..., S, H) of all ranks, of which this one has a shard. Layers over ranks
    read them quantized, and have partial gradients of them; whatever else does gets a plain tensor,
    gathered as it is each time, whose gradient all ranks have alike. Nobody writes to it."""

    shards: Shards
    _rows: dict[How, ScaledTensor]

    @staticmethod
    def __new__(cls, shards: Shards) -> GatheredInput:
        x = shards.x
        self: Any = Tensor._make_wrapper_subclass(
            cls, shards.place.whole, dtype=x.dtype, device=x.device, requires_grad=False
        )
        self.shards, self._rows = shards, {}
        found: GatheredInput = self
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        ranks = self.shards.place.ranks
        return f"GatheredInput({tuple(self.shape)}, {self.dtype}, from {ranks} ranks)"

    def rows(self, how: How) -> ScaledTensor:
        """Kept: layers that share an input read it one after another."""
        if how not in self._rows:
            self._rows[how] = self.shards.rows(how)
        return self._rows[how]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        if name in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in _WRITES or _is_in_place(name) or kwargs.get("inplace"):
            raise ValueError(
                f"{name}: {args[0]} is what layers over ranks read, and cannot be written to; "
                "call it without writing, or take a copy by x.clone()"
            )
        first = args[0] if args else None
        if name in _CASTS and isinstance(first, GatheredInput):
            probe = torch.empty(0, dtype=first.dtype, device=first.device)
            if func(probe, *args[1:], **kwargs) is probe:
                return first
        with torch._C.DisableTorchFunctionSubclass():
            plain = tree_map_only(GatheredInput, _Whole.apply, (args, kwargs))
            return func(*plain[0], **plain[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            made = GatheredInput(args[0].shards)
            made._rows = args[0]._rows
            return made
        plain = tree_map_only(GatheredInput, lambda x: x.shards.plain(), (args, kwargs or {}))
        return func(*plain[0], **plain[1])


#: What is asked of a tensor without its values; and a part of the graph, as checkpoints take it.
_ABOUT = {
    "__hash__", "__len__", "__repr__", "_backward_hooks", "_version", "backward", "detach",
    "device", "dim", "dtype", "element_size", "get_device", "grad", "grad_fn", "is_complex",
    "is_contiguous", "is_cpu", "is_cuda", "is_floating_point", "is_inference", "is_leaf",
    "is_meta", "is_nested", "is_quantized", "is_sparse", "itemsize", "layout", "names", "nbytes",
    "ndim", "ndimension", "nelement", "numel", "output_nr", "register_hook", "requires_grad",
    "requires_grad_", "retain_grad", "retains_grad", "shape", "size", "storage_offset", "stride",
}  # fmt: skip
_WRITES = {
    "__iadd__", "__iand__", "__idiv__", "__ifloordiv__", "__imod__", "__imul__", "__ior__",
    "__ipow__", "__isub__", "__itruediv__", "__set__", "__setitem__",
}  # fmt: skip
#: What may give the tensor itself.
_CASTS = {"bfloat16", "contiguous", "cpu", "cuda", "float", "half", "to"}


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


class _GatherInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        shards = Shards(x.detach(), dim, group)
        ctx.kept, ctx.dim, ctx.group = shards.kept, dim, group
        return GatheredInput(shards)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        for each in ctx.kept.values():
            each.forget()  # all layers have read it
        return scattered_sum(grad, ctx.dim, ctx.group), None, None


class _Whole(torch.autograd.Function):
    """What all ranks read alike: of its gradient, which all have, each adds its own shard's."""

    @staticmethod
    def forward(ctx: Any, x: GatheredInput) -> Tensor:
        ctx.place = x.shards.place
        return x.shards.plain()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (shape, dim, group), mine = ctx.place, torch.zeros_like(grad)
        start, size = dist.get_rank(group) * shape[dim], shape[dim]
        mine.narrow(dim, start, size).copy_(grad.narrow(dim, start, size))
        return mine


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
