"""Logits of experts: what a router chooses by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..watching import has_tangent, is_plain
from .double_backward import refuse_double_backward
from .grouped import reset_as_linear

__all__ = ["Gate", "logits"]


class Gate(torch.nn.Module):
    """Logits of the experts, in fp32, or fp64 of fp64, also under torch's autocast and ours."""

    e_score_correction_bias: Tensor

    def __init__(self, hidden_size: int, num_experts: int, **how: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(num_experts, hidden_size, **how))
        device = how.get("device")
        bias = torch.zeros(num_experts, device=device, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_as_linear(self.weight)
        torch.nn.init.zeros_(self.e_score_correction_bias)

    def forward(self, x: Tensor) -> Tensor:
        return logits(x, self.weight)

    def _apply(self, fn: Any, recurse: bool = True) -> Gate:
        """Moved with the module, what is added to scores stays fp32: its steps are small."""
        name = "e_score_correction_bias"
        bias = self.e_score_correction_bias
        del self._buffers[name]
        super()._apply(fn, recurse)
        moved = fn(bias)
        self._buffers[name] = moved if moved.dtype == bias.dtype else bias.to(moved.device)
        return self

    def extra_repr(self) -> str:
        experts, hidden = self.weight.shape
        return f"{hidden}, {experts}"


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in fp32, or wider."""
    with torch.autocast(x.device.type, enabled=False):
        if has_tensor_cores(x, weight):
            return WidenedProduct.apply(x, weight)
        wide = torch.promote_types(x.dtype, weight.dtype)
        wide = torch.promote_types(wide, torch.float32)
        # not torch.nn.functional.linear, which blockscale.autocast quantizes
        return x.to(wide) @ weight.to(wide).mT


def has_tensor_cores(x: Tensor, weight: Tensor) -> bool:
    """Whether tensor cores multiply these into fp32. (torch.mm has ``out_dtype`` on CUDA alone.)"""
    if not (x.is_cuda and x.dim() == 2 and x.dtype == weight.dtype == torch.bfloat16):
        return False
    if torch.compiler.is_compiling():
        return True
    return is_plain(x) and is_plain(weight) and not has_tangent(x, weight)


class WidenedProduct(torch.autograd.Function):
    """``x @ weight.T`` of bf16 matrices in fp32: products of bf16 numbers are exact there, so it is
    as good as that of fp32 copies, without the copies.

    The gradient is in fp32, and is multiplied as the sum of two bf16 numbers, which have 16 of its
    24 bits: its products are rounded to bf16 in any case.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return widened(x, weight.mT)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        with torch.no_grad():
            high = grad.bfloat16()
            low = (grad - high.float()).bfloat16()
            of_x = of_weight = None
            if ctx.needs_input_grad[0]:
                of_x = widened(high, weight).add_(widened(low, weight)).to(x.dtype)
            if ctx.needs_input_grad[1]:
                of_weight = widened(high.mT, x).add_(widened(low.mT, x)).to(weight.dtype)
        return refuse_double_backward((of_x, of_weight), grad, x, weight)


def widened(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)
