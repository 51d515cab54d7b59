"""A linear layer whose rows are grouped, each group with a weight of its own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import group_passes, observing
from .double_backward import refuse_double_backward
from .group_checks import check_grouped, check_recipe_of_groups
from .group_operands import Rows, operands
from .group_passes import Product
from .main_grad import apply, leaf_of, open_main_grad
from .output_dtype import output_dtype
from .recipe import Recipe
from .reuse import ForgetsWeights
from .unscripted import Unscripted

__all__ = ["GroupedLinear", "grouped_linear", "reset_as_linear"]


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe | None,
) -> Tensor:
    """``x[start:end] @ weight[i].T + bias[i]`` of each group, differentiable once.

    >>> ends = torch.tensor([3, 8], dtype=torch.int32)
    >>> w = torch.randn(2, 32, 64)
    >>> bs.nn.grouped_linear(torch.randn(8, 64), w, ends, recipe=bs.Recipe("mxfp8")).shape
    torch.Size([8, 32])

    Args:
        x: (M, K), float32, bfloat16 or float16 (float64, too, without a recipe).
        weight: (groups, N, K), the high-precision master, as of :func:`blockscale.nn.linear`.
        offsets: int32 (groups,), on the device of ``x``: the end of each group. Groups may have no
            rows. Rows after the last one give zeros.
        bias: (groups, N) or None.
        recipe: how the three products are quantized; None: not at all, one group after another, or
            by torch's grouped_mm, in bf16 on a GPU.

    Returns (M, N) in the dtype of ``x``, or that of torch.autocast. Until the backward, x is kept
    quantized by columns.

    Raises ValueError or TypeError as :func:`blockscale.nn.linear` and
    :func:`blockscale.grouped_gemm`.
    """
    check_grouped(x, weight, offsets, bias, recipe)
    how = recipe, output_dtype(x), torch.is_grad_enabled()  # inside, none is enabled
    return apply(_GroupedLinear, (weight,), x, weight, bias, offsets, *how)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        offsets: Tensor,
        recipe: Recipe | None,
        dtype: torch.dtype,
        grad_enabled: bool,
    ) -> Tensor:
        recipe = recipe if x.numel() and weight.numel() else None  # nothing to quantize
        ctx.site = observing.site()
        of_x, of_weight = (grad_enabled and need for need in ctx.needs_input_grad[:2])
        rows, columns, _ = operands(
            Rows(x), recipe, "activations", offsets, dtype, rows=True, columns=of_weight
        )
        y = group_passes.fprop(rows, weight, offsets, Product(recipe, dtype, dgrad=of_x))
        if bias is not None:
            y = (y + group_passes.of_rows(bias, len(x), offsets)).to(dtype)
        ctx.save_for_backward(columns, weight if of_x else None, offsets)
        ctx.leaf = leaf_of("weight", weight) if of_weight else None
        ctx.how = recipe, x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, offsets = ctx.saved_tensors
        recipe, x_dtype, w_dtype, bias_dtype = ctx.how
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        made: list[Tensor | None] = [None] * 3
        main_grad = open_main_grad("weight", ctx.leaf)
        with torch.no_grad(), observing.at(ctx.site):
            g = grad.contiguous()
            rows, columns, _ = operands(
                Rows(g), recipe, "gradients", offsets, g.dtype, rows=of_x, columns=of_weight
            )
            if rows is not None:
                made[0] = group_passes.dgrad(rows, weight, offsets, Product(recipe, x_dtype))
            if columns is not None and main_grad is not None:
                group_passes.add_wgrad(main_grad, columns, x, offsets)
            elif columns is not None:
                made[1] = group_passes.wgrad(columns, x, offsets, w_dtype)
            if of_bias:
                made[2] = group_passes.sum_groups(g, offsets, bias_dtype)
        return *refuse_double_backward(tuple(made)), None, None, None, None


def reset_as_linear(weight: Tensor, bias: Tensor | None = None) -> None:
    """As torch.nn.Linear's, of each matrix of a stack."""
    bound = 1 / math.sqrt(max(weight.shape[-1], 1))
    for each in (weight, bias):
        if each is not None:
            torch.nn.init.uniform_(each, -bound, bound)


class GroupedLinear(ForgetsWeights, Unscripted, torch.nn.Module):
    """Linear layers of as many groups of rows, as experts have them.

    >>> layer = bs.nn.GroupedLinear(4, 64, 32, recipe=bs.Recipe("mxfp8"))
    >>> layer(torch.randn(10, 64), torch.tensor([3, 3, 7, 10], dtype=torch.int32)).shape
    torch.Size([10, 32])

    Args:
        num_groups, in_features, out_features: of ``weight`` (num_groups, out_features,
            in_features), which is initialized as torch.nn.Linear's, each group's by itself.
        bias: (num_groups, out_features), if there is one; not by default.
        recipe: as of :func:`grouped_linear`; MXFP8 by default.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | None = Recipe(),  # noqa: B008 - a frozen value
    ) -> None:
        check_recipe_of_groups(recipe)
        super().__init__()
        self.in_features, self.out_features, self.recipe = in_features, out_features, recipe
        how: Any = {"device": device, "dtype": dtype}
        shape = num_groups, out_features, in_features
        self.weight = torch.nn.Parameter(torch.empty(shape, **how))
        of_bias = torch.nn.Parameter(torch.empty(shape[:2], **how)) if bias else None
        self.register_parameter("bias", of_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_as_linear(self.weight, self.bias)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return grouped_linear(x, self.weight, offsets, self.bias, recipe=self.recipe)

    def extra_repr(self) -> str:
        groups = self.weight.shape[0]
        return (
            f"num_groups={groups}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}, recipe={self.recipe}"
        )
