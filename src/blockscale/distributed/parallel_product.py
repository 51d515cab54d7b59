"""The product of a linear layer whose weight ranks share, of what this rank has of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..nn import passes
from ..nn.double_backward import refuse_double_backward
from ..nn.forms import Forms, quantize_forms
from ..nn.output_dtype import output_dtype
from ..nn.recipe import PRODUCTS, Recipe
from ..nn.reuse import quantized_weight
from .gathered_input import GatheredInput
from .shards import How
from .shared import as_shared

__all__ = ["multiply"]


def multiply(x: Tensor, weight: DTensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """``x @ weight.T + bias`` of this rank's part of ``weight`` (N, K), of which each rank has some
    rows, or some columns: then the sum over ranks is the product.

    What comes as shards, a :class:`GatheredInput`, is gathered as products read it: ``x``, and the
    gradient.
    """
    if not x.numel():  # there is nothing to quantize
        recipe = replace(recipe, high_precision=PRODUCTS)
    trains = torch.is_grad_enabled()
    dgrad, wgrad = trains and x.requires_grad, trains and weight.requires_grad
    found: Tensor = _Product.apply(x, weight, bias, recipe, output_dtype(x), dgrad, wgrad)
    return found


class _Product(torch.autograd.Function):
    """Keeps x quantized by columns, or its shards. ``dgrad`` and ``wgrad``: whether these products
    will follow."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: DTensor,
        bias: Tensor | None,
        recipe: Recipe,
        out_dtype: torch.dtype,
        dgrad: bool,
        wgrad: bool,
    ) -> Tensor:
        group, local = weight.device_mesh.get_group(), weight._local_tensor
        quantized = passes.quantized_products(recipe)
        shared = isinstance(x, GatheredInput)
        keeps = wgrad and quantized["wgrad"] and not shared
        forms = _forms(x, recipe, "activations", group, rows=quantized["fprop"], columns=keeps)
        scalar, values = None, getattr(local, "master", local)
        if values is not None:  # else ranks have agreed on it
            scalar = _how(recipe, "weights").global_scale(values, group)
        if forms.rows is not None:
            made = partial(_quantized, global_scale=scalar)
            y, scalar = passes.multiply(forms.rows, local, bias, recipe, out_dtype, made)
        else:
            y = torch.nn.functional.linear(_matrix(x).to(out_dtype), local.to(out_dtype))
            y = y if bias is None else y + bias.to(out_dtype)
        kept = ctx.shards = None
        if wgrad and isinstance(x, GatheredInput):
            ctx.shards = x.shards.keep(_how(recipe, "activations") if quantized["wgrad"] else None)
        elif wgrad:
            kept = _matrix(x) if forms.columns is None else forms.columns
        ctx.save_for_backward(weight if dgrad or wgrad else None, scalar, kept)
        ctx.about = recipe, x.shape, x.dtype, None if bias is None else bias.dtype
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            gradients = _gradients(ctx, grad)
        return *refuse_double_backward(gradients), None, None, None, None


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dgrad, wgrad, bias_grad = ctx.needs_input_grad[:3]
    recipe, x_shape, x_dtype, bias_dtype = ctx.about
    weight, scalar, x = ctx.saved_tensors
    grad_x = grad_weight = grad_bias = None
    quantized = passes.quantized_products(recipe)
    if dgrad or wgrad:
        group, local = weight.device_mesh.get_group(), weight._local_tensor
        rows, columns = _forms(
            grad,
            recipe,
            "gradients",
            group,
            rows=dgrad and quantized["dgrad"],
            columns=wgrad and quantized["wgrad"],
        )
    if dgrad:
        g = _matrix(grad) if rows is None else rows
        grad_x = passes.data_gradient(g, local, scalar, recipe, x_dtype, _quantized)
        grad_x = grad_x.view(x_shape)
        del g, rows  # the peak of memory is in the product to come
    if wgrad:
        if ctx.shards is not None:
            x = ctx.shards.whole()
        g = _matrix(grad) if columns is None else columns
        found = passes.weight_gradient(g, x, weight.dtype)
        assert found is not None
        grad_weight = as_shared(found, weight)
    if bias_grad:
        grad_bias = _matrix(grad).sum(0, dtype=torch.float32).to(bias_dtype)
    return grad_x, grad_weight, grad_bias


def _how(recipe: Recipe, role: str) -> How:
    return How(recipe.format_of(role).name, recipe.scale_rounding)


def _forms(
    x: Tensor, recipe: Recipe, role: str, group: dist.ProcessGroup, *, rows: bool, columns: bool
) -> Forms:
    """What is asked for of a matrix, or of all its shards; ranks agree on a global scale."""
    how = _how(recipe, role)
    if isinstance(x, GatheredInput):
        by_columns: Any = x.shards.keep(how).whole() if columns else None
        return Forms(x.shards.rows(how) if rows else None, by_columns)
    matrix = passes.matrix_of(x)
    scalar = how.global_scale(matrix, group) if rows or columns else None
    return quantize_forms(matrix, *how[:2], rows=rows, columns=columns, global_scale=scalar)


def _quantized(local: Tensor, *how: Any, **wanted: Any) -> Forms:
    """Forms of this rank's part of a weight, anew in each pass: torch does not count all writes to
    a DTensor, so that none could be kept in ``reuse_weights``."""
    if hasattr(local, "quantized_forms"):
        return quantized_weight(local, *how, **wanted)
    return quantize_forms(local, *how, **wanted)


def _matrix(x: Tensor) -> Tensor:
    """Rows in high precision, gathered if need be."""
    return passes.matrix_of(x.shards.plain() if isinstance(x, GatheredInput) else x)
