"""A linear layer whose three products are block-scaled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..gemm import gemm
from .cache import quantized_weight
from .forms import quantize_forms
from .recipe import PRODUCTS, Recipe

__all__ = ["Linear", "linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: Recipe) -> Tensor:
    """``x @ weight.T + bias`` with products quantized as ``recipe`` says, differentiable.

    Args:
        x: (..., K), float32, bfloat16 or float16.
        weight: (N, K), the high-precision master; its quantized forms are cached until it changes.
        bias: (N,) or None.

    Returns (..., N) in the dtype of ``x``, or that of torch.autocast where it is on. Blocks run
    along the contraction of each product: fprop x and w by rows; dgrad g by rows, w by columns;
    wgrad g and x by columns. Each tensor is read once for both of its forms. Dimensions that are no
    multiple of a block are padded with zeros.
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
    trains = torch.is_grad_enabled()
    dgrad, wgrad = trains and x.requires_grad, trains and weight.requires_grad
    return _Linear.apply(x, weight, bias, recipe, out_dtype, dgrad, wgrad)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        out_dtype: torch.dtype,
        dgrad: bool,
        wgrad: bool,
    ) -> Tensor:
        """``dgrad`` and ``wgrad``: whether these products will follow."""
        x_rows = x.reshape(-1, x.shape[-1]).contiguous()
        quantized = {product: product not in recipe.high_precision for product in PRODUCTS}
        x_forms = quantize_forms(
            x_rows,
            recipe.format_of("activations").name,
            recipe.scale_rounding,
            rows=quantized["fprop"],
            columns=wgrad and quantized["wgrad"],
        )
        w_forms = quantized_weight(
            weight,
            recipe.format_of("weights").name,
            recipe.scale_rounding,
            rows=quantized["fprop"],
            columns=dgrad and quantized["dgrad"],
        )
        if x_forms.rows is not None and w_forms.rows is not None:
            y = gemm(x_forms.rows, w_forms.rows.mT, out_dtype, bias=bias)
        else:
            y = x_rows.to(out_dtype) @ weight.to(out_dtype).mT
            y = y if bias is None else y + bias.to(out_dtype)
        # all that the backward pass reads again: x by columns, w by columns
        x_kept = x_rows if x_forms.columns is None else x_forms.columns
        w_kept = w_forms.columns if quantized["dgrad"] else weight
        ctx.save_for_backward(x_kept if wgrad else None, w_kept if dgrad else None)
        ctx.recipe, ctx.quantized, ctx.x_shape = recipe, quantized, x.shape
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_kept, w_kept = ctx.saved_tensors
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        dgrad, wgrad, bias_grad = ctx.needs_input_grad[:3]
        g = grad.reshape(-1, grad.shape[-1]).contiguous()
        g_forms = quantize_forms(
            g,
            ctx.recipe.format_of("gradients").name,
            ctx.recipe.scale_rounding,
            rows=dgrad and ctx.quantized["dgrad"],
            columns=wgrad and ctx.quantized["wgrad"],
        )
        grad_x = grad_weight = grad_bias = None
        if g_forms.rows is not None:
            grad_x = gemm(g_forms.rows, w_kept, x_dtype)
        elif dgrad:
            grad_x = (g @ w_kept.to(g.dtype)).to(x_dtype)
        if g_forms.columns is not None:
            grad_weight = gemm(g_forms.columns.mT, x_kept, w_dtype)
        elif wgrad:
            grad_weight = (g.mT @ x_kept.to(g.dtype)).to(w_dtype)
        if bias_grad:
            grad_bias = g.sum(0, dtype=torch.float32).to(bias_dtype)
        if grad_x is not None:
            grad_x = grad_x.reshape(ctx.x_shape)
        return grad_x, grad_weight, grad_bias, None, None, None, None


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
