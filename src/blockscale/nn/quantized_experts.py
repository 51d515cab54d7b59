"""Experts whose matrices are held quantized, for inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..routing import Routing
from ..tensor import ScaledTensor
from . import experts_backward, group_passes, observing
from .double_backward import refuse_double_backward
from .experts_call import Call, ExpertsConfig
from .gated import SWIGLU, GatedActivation, exact
from .group_checks import ExpertParameters, check_held_experts
from .group_operands import Activated, Rows, Scaled, Source, operands
from .output_dtype import output_dtype
from .quantized import has_input_scale
from .recipe import Recipe

__all__ = ["quantized_experts", "quantized_grouped_linear"]


def quantized_experts(
    x: Tensor,
    weights: Tensor | None,
    routing: Routing | Tensor,
    up: ScaledTensor,
    down: ScaledTensor,
    *,
    recipe: Recipe,
    gate: ScaledTensor | None = None,
    activation: GatedActivation = SWIGLU,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool = False,
    up_input_scale: Tensor | None = None,
    down_input_scale: Tensor | None = None,
) -> Tensor:
    """:func:`experts` by stacks of matrices that are quantized already.

    >>> routing = bs.route(torch.tensor([[1, 0], [1, 2]]), 3)
    >>> x, s = torch.randn(2, 64).bfloat16(), torch.full((2, 2), 0.5)
    >>> up, down = torch.randn(3, 2 * 32, 64), torch.randn(3, 64, 32)
    >>> up, down = (bs.quantize(each, "nvfp4") for each in (up, down))
    >>> recipe = bs.Recipe("nvfp4", activations="bfloat16")
    >>> bs.nn.quantized_experts(x, s, routing, up, down, recipe=recipe).shape
    torch.Size([2, 64])

    Args:
        x: (tokens, H), float32, bfloat16 or float16. Its rows, and what the activation makes, are
            quantized as ``recipe`` says. Where that leaves activations as they are, the first
            product and the activation are rounded to the type of the result, and products with the
            exact values of the matrices are summed in fp32; kernels do that for bfloat16.
        weights, routing: as of :func:`experts`.
        up, down: (experts, 2I, H) and (experts, H, I), blocked along axis -1, with one global scale
            or one for each expert, in the format that ``recipe`` names for weights.
        recipe: how activations are quantized; of its other fields none counts here.
        gate: (experts, I, H), where it is a stack of its own, beside ``up`` (experts, I, H): its
            global scales may be others.
        activation, up_bias, down_bias: as of :func:`experts`.
        transposed: ``up`` is (experts, H, 2I), ``down`` (experts, I, H), blocked along axis -2.
        up_input_scale, down_input_scale: global scales of what both products read, fp32 numbers,
            where activations have one, as of :func:`quantized_linear`. None: those of all rows.

    Returns (tokens, H) in the dtype of ``x``, or that of torch.autocast: the bits of
    :func:`experts` with the same recipe, if that quantizes its weights to these. On a GPU the host
    waits for nothing where kernels multiply. x, ``weights`` and biases have gradients, those of
    products by the exact values of the matrices, summed in fp32, one matrix dequantized after the
    other; matrices have none.

    Raises ValueError or TypeError, with the remedy, where these do not belong together or
    ``recipe`` does not quantize rows of groups, and NotImplementedError as
    :func:`quantized_linear`.
    """
    held = ExpertParameters(up, down, up_bias, down_bias, gate)
    check_held_experts(x, weights, routing, held, recipe, transposed, activation.interleaved)
    scales = up_input_scale, down_input_scale
    if scales != (None, None) and not has_input_scale(recipe):
        raise ValueError(
            f"up_input_scale: activations of {recipe} have no global scale; leave it out"
        )
    routed = routing if isinstance(routing, Routing) else (None, None, routing, None)
    dtype = output_dtype(x)
    if recipe.weight_only:
        x = x.to(dtype)  # others are quantized from what they are
    how = ExpertsConfig(
        _recipe_of_rows(x, weights, recipe),
        activation if recipe.weight_only else exact(activation),
        dtype,
        transposed,
        None,
        torch.is_grad_enabled(),  # inside of autograd's function none is
    )
    return _QuantizedExperts.apply(how, *scales, x, weights, *held, *routed)


def _recipe_of_rows(x: Tensor, weights: Tensor | None, recipe: Recipe) -> Recipe | None:
    """None where rows are not quantized, or there are none."""
    has_rows = x.numel() > 0 and (weights is None or weights.numel() > 0)
    return None if recipe.weight_only or not has_rows else recipe


def _scaled(source: Source, global_scale: Tensor | None) -> Source:
    return source if global_scale is None else Scaled(source, lambda format: global_scale)


class _QuantizedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: ExpertsConfig,
        up_input_scale: Tensor | None,
        down_input_scale: Tensor | None,
        *tensors: Any,
    ) -> Tensor:
        call = Call.of(how, tensors)
        ctx.site = observing.site()
        rows = _scaled(Rows(call.x, call.tokens), up_input_scale)
        h = call.multiply(rows, "up", dgrad=False)
        y = call.multiply(
            _scaled(Activated(how.activation, h), down_input_scale), "down", dgrad=False
        )
        if how.grad_enabled and any(ctx.needs_input_grad):
            # of weights themselves the layer could not be moved meanwhile
            kept = [t.detach() if isinstance(t, ScaledTensor) else t for t in tensors]
            ctx.save_for_backward(*kept, h)
        ctx.how = how
        return call.combined(y, call.weights, how.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, h = ctx.saved_tensors
        with torch.no_grad(), observing.at(ctx.site):
            call = Call.of(ctx.how._replace(recipe=None), tensors)  # by exact values
            g = Rows(grad.to(ctx.how.dtype), call.tokens)
            found = experts_backward.gradients(ctx.needs_input_grad[3:], call, h, g)
        others = (None,) * (len(tensors) - len(found))
        return None, None, None, *refuse_double_backward(found), *others


def quantized_grouped_linear(
    x: Tensor,
    weight: ScaledTensor,
    offsets: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    transposed: bool,
) -> Tensor:
    """``grouped_linear`` by a stack that is quantized already, of arguments that were checked; its
    gradients are those of :func:`quantized_experts`."""
    dtype = output_dtype(x)
    x = x.to(dtype) if recipe.weight_only else x
    how = _recipe_of_rows(x, None, recipe), dtype, transposed
    return _QuantizedGroupedLinear.apply(x, weight, bias, offsets, *how)


class _QuantizedGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: ScaledTensor,
        bias: Tensor | None,
        offsets: Tensor,
        recipe: Recipe | None,
        dtype: torch.dtype,
        transposed: bool,
    ) -> Tensor:
        rows = operands(Rows(x), recipe, "activations", offsets, dtype, rows=True).rows
        how = group_passes.Product(recipe, dtype, transposed)
        y = group_passes.fprop(rows, weight, offsets, how)
        if bias is not None:
            y = (y + group_passes.of_rows(bias, len(x), offsets)).to(dtype)
        ctx.save_for_backward(weight.detach() if ctx.needs_input_grad[0] else None, offsets)
        ctx.how = group_passes.Product(None, x.dtype, transposed)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, offsets = ctx.saved_tensors
        g, dx, bias = grad.contiguous(), None, None
        with torch.no_grad():
            if ctx.needs_input_grad[0]:
                dx = group_passes.dgrad(g, weight, offsets, ctx.how)
            if ctx.needs_input_grad[2]:
                bias = group_passes.sum_groups(g, offsets, ctx.bias_dtype)
        return *refuse_double_backward((dx, None, bias)), None, None, None, None
