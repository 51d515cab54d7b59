"""A linear layer whose three products are block-scaled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..gemm import gemm
from ..quantize import quantize
from ..tensor import ScaledTensor
from .cache import quantized_weight
from .recipe import Recipe

__all__ = ["Linear", "linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: Recipe) -> Tensor:
    """``x @ weight.T + bias`` with products quantized as ``recipe`` says, differentiable.

    Args:
        x: (..., K), float32, bfloat16 or float16.
        weight: (N, K), the high-precision master; its quantized forms are cached until it changes.
        bias: (N,) or None.

    Returns (..., N) in the dtype of ``x``, or that of torch.autocast where it is on. Blocks run
    along the contraction of each product: fprop x and w by rows; dgrad g by rows, w by columns;
    wgrad g and x by columns. Dimensions that are no multiple of a block are padded with zeros.
    Raises ValueError or TypeError as torch.nn.functional.linear and :func:`blockscale.quantize`.
    """
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x, weight: got {tuple(x.shape)} and {tuple(weight.shape)}; expected (..., K), (N, K)"
        )
    if torch.is_autocast_enabled(x.device.type):
        out_dtype = torch.get_autocast_dtype(x.device.type)
    else:
        out_dtype = x.dtype
    return _Linear.apply(x, weight, bias, recipe, out_dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        out_dtype: torch.dtype,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if "fprop" in recipe.high_precision:
            y = rows.to(out_dtype) @ weight.to(out_dtype).mT
            y = y if bias is None else y + bias.to(out_dtype)
        else:
            y = gemm(
                _quantize(rows, recipe, "activations", -1),
                _weight(weight, recipe, -1).mT,
                out_dtype,
                bias=bias,
            )
        x_by_columns: Tensor | None = None
        if weight.requires_grad:  # wgrad contracts the rows: only this form of x is needed again
            x_by_columns = rows
            if "wgrad" not in recipe.high_precision:
                x_by_columns = _quantize(rows, recipe, "activations", -2)
        ctx.save_for_backward(x_by_columns, weight)
        ctx.recipe, ctx.x_shape, ctx.x_dtype = recipe, x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_by_columns, weight = ctx.saved_tensors
        recipe = ctx.recipe
        g = grad.reshape(-1, grad.shape[-1]).contiguous()
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            if "dgrad" in recipe.high_precision:
                grad_x = g @ weight.to(g.dtype)
            else:
                grad_x = gemm(
                    _quantize(g, recipe, "gradients", -1), _weight(weight, recipe, -2), ctx.x_dtype
                )
            grad_x = grad_x.to(ctx.x_dtype).reshape(ctx.x_shape)
        if ctx.needs_input_grad[1]:
            if "wgrad" in recipe.high_precision:
                grad_weight = (g.mT @ x_by_columns.to(g.dtype)).to(weight.dtype)
            else:
                g_by_columns = _quantize(g, recipe, "gradients", -2)
                grad_weight = gemm(g_by_columns.mT, x_by_columns, weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = g.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None


def _quantize(x: Tensor, recipe: Recipe, role: str, axis: int) -> ScaledTensor:
    name = recipe.format_of(role).name
    return quantize(x, name, axis, scale_rounding=recipe.scale_rounding, pad=True)


def _weight(weight: Tensor, recipe: Recipe, axis: int) -> ScaledTensor:
    name = recipe.format_of("weights").name
    return quantized_weight(weight, axis, name, recipe.scale_rounding)


class Linear(torch.nn.Linear):
    """torch.nn.Linear with block-scaled products.

    Parameters, their names and the state_dict are those of torch.nn.Linear: the weight stays in
    high precision. ``recipe`` is a :class:`Recipe`; the other arguments are torch.nn.Linear's.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = Recipe() if recipe is None else recipe

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, recipe=self.recipe)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}"
