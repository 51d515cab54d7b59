"""Experts: two products of grouped rows with a gated activation between, and what tokens get."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..routing import Routing, combine
from ..tensor import ScaledTensor
from . import group_passes
from .double_backward import refuse_double_backward
from .forms import Forms
from .gated import SWIGLU, GatedActivation, exact
from .group_checks import Held, check_experts
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

    Returns (tokens, H) in the dtype of ``x``, or that of torch.autocast. Until the backward, x and
    the first product (R, 2I) are kept, beside what the caller has: not the second one's result, as
    the gradient of ``weights`` is that of its input, ``<dA', A>``. Tokens are gathered and
    quantized again in the backward. Sums have the same order in every run.

    Raises ValueError or TypeError as :func:`blockscale.nn.linear`, and where shapes do not fit.

    Source: Guo et al., "SonicMoE", arXiv 2512.14080 (what is kept, and the gradient of weights).
    """
    held = Held(up, down, up_bias, down_bias)
    check_experts(x, weights, routing, held, recipe, transposed)
    recipe = recipe if x.numel() else None
    activation = activation if recipe is None else exact(activation)
    how = _How(recipe, activation, output_dtype(x), transposed)
    return _Experts.apply(how, x, weights, *held, *routing)


class _How(NamedTuple):
    """What does not change with the tensors; nothing is quantized where there is nothing."""

    recipe: Recipe | None
    activation: GatedActivation
    dtype: torch.dtype
    transposed: bool


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
        recipe, activation, dtype, transposed = how
        offsets = routing.offsets
        rows = _gathered(x, routing, recipe, "activations", rows="fprop").rows
        x_rows = x[routing.tokens].to(dtype) if rows is None else rows
        h = _add(
            group_passes.fprop(x_rows, up, offsets, recipe, dtype, transposed), up_bias, offsets
        )
        a = _activated(h, offsets, recipe, activation)
        y = _add(
            group_passes.fprop(a, down, offsets, recipe, dtype, transposed), down_bias, offsets
        )
        ctx.save_for_backward(x, weights, *others, h)
        ctx.how = how
        return combine(y, routing.slots, weights, dtype)

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
    (recipe, activation, dtype, transposed), routing = how, Routing(*routed)
    offsets, grad = routing.offsets, grad.to(dtype)
    of_x, of_weights, of_up, of_down, of_up_bias, of_down_bias = (*needs[:6],)
    gradients: list[Tensor | None] = [None] * 6
    scale = weights.flatten()[routing.pairs].to(torch.promote_types(dtype, torch.float32))

    inner = of_x or of_weights or of_up or of_up_bias
    g = _gathered(grad, routing, recipe, "gradients", rows="dgrad" if inner else "",
                  columns="wgrad" if of_down else "")  # fmt: skip
    lacking = (inner and g.rows is None) or (of_down and g.columns is None)
    g_rows = grad[routing.tokens] if lacking or of_down_bias else None
    a = activation(h)
    if inner:
        left = _first(g.rows, g_rows)
        da = group_passes.dgrad(left, down, offsets, recipe, dtype, transposed)
        if of_weights:
            of_pairs = (da.to(scale.dtype) * a.to(scale.dtype)).sum(-1)
            if down_bias is not None:
                own = group_passes.of_rows(down_bias, len(h), offsets)
                of_pairs += (grad[routing.tokens] * own).sum(-1, dtype=scale.dtype)
            gradients[1] = of_pairs[routing.slots].to(weights.dtype)
        da = (da.to(scale.dtype) * scale[:, None]).to(dtype)
    if of_down:
        scaled = (a.to(scale.dtype) * scale[:, None]).to(dtype)
        columns = group_passes.quantize_groups(
            scaled, recipe, "activations", offsets, columns="wgrad"
        ).columns
        gradients[3] = group_passes.wgrad(
            _first(g.columns, g_rows), _first(columns, scaled), offsets, down.dtype, transposed
        )
    if of_down_bias:
        assert g_rows is not None
        scaled = g_rows.to(scale.dtype) * scale[:, None]
        gradients[5] = group_passes.sum_groups(scaled, offsets, down_bias.dtype)
    del g, g_rows, a  # the peak of memory is in what follows
    if of_x or of_up or of_up_bias:
        dh = activation.backward(da, h)
        q = group_passes.quantize_groups(
            dh,
            recipe,
            "gradients",
            offsets,
            rows="dgrad" if of_x else "",
            columns="wgrad" if of_up else "",
        )
        if of_x:
            left = _first(q.rows, dh)
            dx = group_passes.dgrad(left, up, offsets, recipe, dtype, transposed)
            gradients[0] = combine(dx, routing.slots, dtype=x.dtype)
        if of_up:
            columns = _gathered(x, routing, recipe, "activations", columns="wgrad").columns
            x_rows = x[routing.tokens].to(dtype) if columns is None else columns
            left = _first(q.columns, dh)
            gradients[2] = group_passes.wgrad(left, x_rows, offsets, up.dtype, transposed)
        if of_up_bias:
            gradients[4] = group_passes.sum_groups(dh, offsets, up_bias.dtype)
    return tuple(gradients)


def _gathered(
    x: Tensor, routing: Routing, recipe: Recipe | None, role: str, **products: str
) -> Forms:
    """The rows that experts have of ``x``, quantized."""
    if not any(name and group_passes.is_quantized(recipe, name) for name in products.values()):
        return Forms()
    rows = x[routing.tokens]
    return group_passes.quantize_groups(rows, recipe, role, routing.offsets, **products)


def _activated(
    h: Tensor, offsets: Tensor, recipe: Recipe | None, activation: GatedActivation
) -> Tensor | ScaledTensor:
    """What the second product reads."""
    a = activation(h)
    rows = group_passes.quantize_groups(a, recipe, "activations", offsets, rows="fprop").rows
    return a if rows is None else rows


def _add(y: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    if bias is None:
        return y
    return (y + group_passes.of_rows(bias, len(y), offsets)).to(y.dtype)


def _first(*given: Any) -> Any:
    return next(each for each in given if each is not None)
