"""The product of a linear layer whose weight ranks share, of what this rank has of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..nn import observing, passes
from ..nn.double_backward import refuse_double_backward
from ..nn.forms import Forms, quantize_forms
from ..nn.gathered_ops import gathered_dgrad, gathered_fprop
from ..nn.recipe import PRODUCTS, PRODUCTS_OF, Recipe
from ..tensor import ScaledTensor
from .gathered_input import GatheredInput
from .quantizer import Quantizer

__all__ = ["multiply"]


class Call(NamedTuple):
    """How a layer multiplies; ``dgrad`` and ``wgrad``: whether these products will follow."""

    recipe: Recipe
    out_dtype: torch.dtype
    group: dist.ProcessGroup
    dgrad: bool
    wgrad: bool

    def quantizer(self, role: str) -> Quantizer:
        return Quantizer(self.recipe.operand(role))


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    out_dtype: torch.dtype,
    group: dist.ProcessGroup,
) -> Tensor:
    """``x @ weight.T + bias`` of this rank's part (N, K) of a weight, of which each rank has some
    rows, or some columns: then the sum over ranks is the product.

    What comes as shards, a :class:`GatheredInput`, is gathered as products read it: ``x``, and the
    gradient.
    """
    if not x.numel():  # there is nothing to quantize
        recipe = replace(recipe, high_precision=PRODUCTS)
    trains = torch.is_grad_enabled()
    dgrad, wgrad = trains and x.requires_grad, trains and weight.requires_grad
    call = Call(recipe, out_dtype, group, dgrad, wgrad)
    found: Tensor = _Product.apply(x, weight, bias, call)
    return found


class _Product(torch.autograd.Function):
    """Keeps x quantized by columns, or its shards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        quantized, out_dtype = passes.quantized_products(call.recipe), call.out_dtype
        ctx.site = observing.site()
        keeps = call.wgrad and quantized["wgrad"] and not isinstance(x, GatheredInput)
        forms = _forms(x, call, "activations", rows=quantized["fprop"], columns=keeps)
        scalar, values = None, _values(weight)
        if values is not None:  # else ranks have agreed on it
            scalar = call.quantizer("weights").global_scale(values, call.group)
        if forms.rows is not None:
            y = _fprop(forms.rows, weight, scalar, bias, call)
        else:
            y = torch.nn.functional.linear(_matrix(x).to(out_dtype), weight.to(out_dtype))
            y = y if bias is None else y + bias.to(out_dtype)
        kept = ctx.shards = None
        if call.wgrad and isinstance(x, GatheredInput):
            quantizer = call.quantizer("activations") if quantized["wgrad"] else None
            ctx.shards = x.shards.keep(quantizer)
        elif call.wgrad:
            kept = _matrix(x) if forms.columns is None else forms.columns
        ctx.save_for_backward(weight if call.dgrad else None, scalar, kept)
        ctx.call, ctx.x_shape = call, x.shape
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # before it is told where this is: checkpoints repeat the forward
        with torch.no_grad(), observing.at(ctx.site):
            gradients = _gradients(ctx, grad, saved)
        return *refuse_double_backward(gradients), None


def _gradients(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor | None, ...]:
    dgrad, wgrad, bias_grad = ctx.needs_input_grad[:3]
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    weight, scalar, x = saved
    grad_x = grad_weight = grad_bias = None
    quantized = passes.quantized_products(ctx.call.recipe)
    rows, columns = _forms(
        grad,
        ctx.call,
        "gradients",
        rows=dgrad and quantized["dgrad"],
        columns=wgrad and quantized["wgrad"],
    )
    if dgrad:
        g = _matrix(grad) if rows is None else rows
        grad_x = _dgrad(g, weight, scalar, ctx.call.recipe, x_dtype).view(ctx.x_shape)
        del g, rows  # the peak of memory is in the product to come
    if wgrad:
        if ctx.shards is not None:
            x = ctx.shards.whole()
            if isinstance(x, ScaledTensor):
                observing.saw("activations", None, wgrad=x)
        g = _matrix(grad) if columns is None else columns
        grad_weight = passes.weight_gradient(g, x, w_dtype)
    if bias_grad:
        grad_bias = _matrix(grad).sum(0, dtype=torch.float32).to(bias_dtype)
    return grad_x, grad_weight, grad_bias


def _forms(x: Tensor, call: Call, role: str, *, rows: bool, columns: bool) -> Forms:
    """What is asked for of a matrix, or of all its shards; ranks agree on a global scale."""
    quantizer = call.quantizer(role)
    if isinstance(x, GatheredInput):
        by_columns: Any = x.shards.keep(quantizer).whole() if columns else None
        made = Forms(x.shards.rows(quantizer) if rows else None, by_columns)
        observing.saw(role, None, **dict(zip(PRODUCTS_OF[role], made, strict=True)))
        return made
    matrix = passes.matrix_of(x)
    scalar = quantizer.global_scale(matrix, call.group) if rows or columns else None
    made = quantize_forms(
        matrix, quantizer.operand, rows=rows, columns=columns, global_scale=scalar
    )
    observing.saw(role, matrix, **dict(zip(PRODUCTS_OF[role], made, strict=True)))
    return made


def _values(weight: Any) -> Tensor | None:
    """None: other ranks' parts were gathered quantized, and products ask for them by a number."""
    found: Tensor | None = getattr(weight, "master", weight)
    return found


def _fprop(
    x: ScaledTensor, weight: Any, scalar: Tensor | None, bias: Tensor | None, call: Call
) -> Tensor:
    recipe, values = call.recipe, _values(weight)
    if values is None:
        parts = x.qdata, x.qscale, x.global_scale, x.layout_name, list(x.shape), x.dtype
        given = *parts, weight.handle, list(weight.shape), bias
        return gathered_fprop(*given, recipe.text, call.out_dtype)
    # torch does not count all writes to a DTensor, so that nothing is kept in ``reuse_weights``
    made = partial(quantize_forms, global_scale=scalar)
    return passes.multiply(x, values, bias, recipe, call.out_dtype, made)[0]


def _dgrad(
    g: Tensor, weight: Any, scalar: Tensor | None, recipe: Recipe, dtype: torch.dtype
) -> Tensor:
    values = _values(weight)
    if values is not None:
        return passes.data_gradient(g, values, scalar, recipe, dtype, quantize_forms)
    assert isinstance(g, ScaledTensor)  # weights of other recipes are not gathered so
    parts = g.qdata, g.qscale, g.global_scale, g.layout_name, list(g.shape)
    given = *parts, weight.handle, list(weight.shape)
    return gathered_dgrad(*given, recipe.text, dtype)


def _matrix(x: Tensor) -> Tensor:
    """Rows in high precision, gathered if need be."""
    return passes.matrix_of(x.shards.plain() if isinstance(x, GatheredInput) else x)
