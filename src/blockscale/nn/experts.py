"""Experts: two products of grouped rows with a gated activation between, and what tokens get."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..quantize import quantize
from ..routing import Routing, combine
from ..tensor import ScaledTensor
from . import group_passes
from .double_backward import refuse_double_backward
from .gated import SWIGLU, GatedActivation, exact
from .group_checks import Held, check_experts, check_saved_format
from .group_operands import Activated, ActivatedBackward, Rows, Source, operands
from .output_dtype import output_dtype
from .recipe import Recipe

__all__ = ["experts"]


def experts(
    x: Tensor,
    weights: Tensor,
    routing: Routing,
    up: Tensor,
    down: Tensor,
    *,
    recipe: Recipe | None,
    activation: GatedActivation = SWIGLU,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool = False,
    saved_format: str | None = None,
) -> Tensor:
    """``sum_j weights[:, j] * (activation(x @ up[e].T) @ down[e].T)`` of each token's experts e.

    >>> routing = bs.route(torch.tensor([[1, 0], [1, 2]]), 3)
    >>> x, s = torch.randn(2, 64), torch.full((2, 2), 0.5)
    >>> up, down = torch.randn(3, 2 * 32, 64), torch.randn(3, 64, 32)
    >>> bs.nn.experts(x, s, routing, up, down, recipe=bs.Recipe("mxfp8")).shape
    torch.Size([2, 64])

    Args:
        x: (tokens, H), float32, bfloat16 or float16.
        weights: (tokens, top_k), floating: what each pair's result is multiplied by, in fp32.
        routing: of :func:`blockscale.route`.
        up: (experts, 2I, H), gate and up, the gate's rows first.
        down: (experts, H, I).
        recipe: how the products are quantized; None: not at all.
        activation: between the products.
        up_bias, down_bias: (experts, 2I) and (experts, H), or None.
        transposed: ``up`` is (experts, H, 2I), ``down`` (experts, I, H), as gpt-oss has them.
        saved_format: what the first product is quantized to until the backward, along its rows:
            "mxfp8" keeps half the bytes, and rounds gradients once more; None: as it is.

    Returns (tokens, H) in the dtype of ``x``, or that of torch.autocast. Until the backward, x and
    the first product (R, 2I) are kept, beside what the caller has: not the second one's result, as
    the gradient of ``weights`` is that of its input, ``<dA', A>``. Tokens are gathered and
    quantized again in the backward. Sums have the same order in every run.

    Raises ValueError or TypeError as :func:`blockscale.nn.linear`, and where shapes do not fit.

    Source: Guo et al., "SonicMoE", arXiv 2512.14080 (what is kept, and the gradient of weights).
    """
    held = Held(up, down, up_bias, down_bias)
    check_experts(x, weights, routing, held, recipe, transposed)
    check_saved_format(saved_format)
    recipe, saved_format = (recipe, saved_format) if x.numel() else (None, None)
    activation = activation if recipe is None else exact(activation)
    how = _How(recipe, activation, output_dtype(x), transposed, saved_format)
    return _Experts.apply(how, x, weights, *held, *routing)


class _How(NamedTuple):
    """What does not change with the tensors; nothing is quantized where there is nothing."""

    recipe: Recipe | None
    activation: GatedActivation
    dtype: torch.dtype
    transposed: bool
    saved_format: str | None


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: _How,
        x: Tensor,
        weights: Tensor,
        *others: Any,  # what experts hold, and the routing
    ) -> Tensor:
        held, routing = Held(*others[:4]), Routing(*others[4:])
        up, down, up_bias, down_bias = held
        offsets = routing.offsets

        def multiply(source: Source, weight: Tensor, bias: Tensor | None) -> Tensor:
            """What is quantized for it is freed when it returns."""
            rows = operands(source, how.recipe, "activations", offsets, how.dtype, rows=True).rows
            y = group_passes.fprop(rows, weight, offsets, how.recipe, how.dtype, how.transposed)
            if bias is not None:
                y = (y + group_passes.of_rows(bias, len(y), offsets)).to(y.dtype)
            return y

        h = multiply(Rows(x, routing.tokens), up, up_bias)
        y = multiply(Activated(how.activation, h), down, down_bias)
        if how.saved_format is not None and any(ctx.needs_input_grad):
            h = quantize(h, how.saved_format, pad=True)
        ctx.save_for_backward(x, weights, *others, h)
        ctx.how = how
        return combine(y, routing.slots, weights, how.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            gradients = _gradients(ctx.needs_input_grad[1:], ctx.saved_tensors, ctx.how, grad)
        return None, *refuse_double_backward(gradients), None, None, None


def _gradients(
    needs: tuple[bool, ...],
    saved: tuple[Any, ...],
    how: _How,
    grad: Tensor,
) -> tuple[Tensor | None, ...]:
    """Of x, weights, up, down and the biases."""
    x, weights, up, down, up_bias, down_bias, *routed, h = saved
    (recipe, activation, dtype, transposed, _), routing = how, Routing(*routed)
    h = h.dequantize(dtype) if isinstance(h, ScaledTensor) else h
    offsets, grad = routing.offsets, grad.to(dtype)
    of_x, of_weights, of_up, of_down, of_up_bias, of_down_bias = needs[:6]
    gradients: list[Tensor | None] = [None] * 6
    scale = weights.flatten()[routing.pairs].to(torch.promote_types(dtype, torch.float32))
    inner = of_x or of_weights or of_up or of_up_bias
    how_many = recipe, "activations", offsets, dtype
    tokens = routing.tokens

    g = operands(
        Rows(grad, tokens), recipe, "gradients", offsets, dtype, rows=inner, columns=of_down
    )
    da: Any = None
    if g.rows is not None:
        da = group_passes.dgrad(g.rows, down, offsets, recipe, dtype, transposed)
    if g.columns is not None:
        own = operands(Activated(activation, h, scale), *how_many, columns=True)
        gradients[3] = group_passes.wgrad(g.columns, own.columns, offsets, down.dtype, transposed)
        del own
    del g  # the peak of memory is in what follows
    of_pairs: Any = None
    if inner:
        source: Source = ActivatedBackward(activation, da, h, scale)
        if of_up_bias:
            dh, of_pairs = source.values()
            gradients[4] = group_passes.sum_groups(dh, offsets, up_bias.dtype)
            source = Rows(dh)
        elif not (of_x or of_up):
            of_pairs = source.values()[1]
        g = operands(source, recipe, "gradients", offsets, dtype, rows=of_x, columns=of_up)
        of_pairs = g.of_weights if of_pairs is None else of_pairs
        del da, source
        if g.rows is not None:
            dx = group_passes.dgrad(g.rows, up, offsets, recipe, dtype, transposed)
            gradients[0] = combine(dx, routing.slots, dtype=x.dtype)
            del dx
        if g.columns is not None:
            own = operands(Rows(x, tokens), *how_many, columns=True)
            gradients[2] = group_passes.wgrad(g.columns, own.columns, offsets, up.dtype, transposed)
    if down_bias is not None:
        rows = grad[tokens]
        if of_weights:
            biases = group_passes.of_rows(down_bias, len(h), offsets)
            of_pairs = of_pairs + (rows * biases).sum(-1, dtype=scale.dtype)
        if of_down_bias:
            scaled = rows.to(scale.dtype) * scale[:, None]
            gradients[5] = group_passes.sum_groups(scaled, offsets, down_bias.dtype)
    if of_weights:
        gradients[1] = of_pairs[routing.slots].to(weights.dtype)
    return tuple(gradients)
