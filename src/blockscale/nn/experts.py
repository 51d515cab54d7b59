"""Experts: two products of grouped rows with a gated activation between, and what tokens get."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..quantize import quantize
from ..routing import Routing
from ..tensor import ScaledTensor
from ..watching import is_plain, is_transformed, unwatched
from . import experts_backward, observing
from .double_backward import refuse_double_backward
from .experts_call import Call, ExpertsConfig
from .gated import SWIGLU, GatedActivation, exact
from .group_checks import ExpertParameters, check_experts, check_saved_format
from .group_launches import Launches, call_key
from .group_operands import Activated, Rows
from .main_grad import apply, leaf_of, open_main_grad
from .output_dtype import output_dtype
from .plan_cache import find, keep
from .recipe import Recipe

__all__ = ["experts"]


def experts(
    x: Tensor,
    weights: Tensor | None,
    routing: Routing | Tensor,
    up: Tensor,
    down: Tensor,
    *,
    recipe: Recipe | None,
    gate: Tensor | None = None,
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
        routing: of :func:`blockscale.route`. Or int32 (experts,), the end of each expert's rows in
            ``x``, whose rows are in that order already: then ``weights`` is None, and each row has
            a result.
        up: (experts, 2I, H), gate and up as ``activation`` has them: the gate's rows first, or
            interleaved.
        down: (experts, H, I).
        gate: (experts, I, H), where it is a stack of its own, beside ``up`` (experts, I, H).
        recipe: how the products are quantized; None: not at all.
        activation: between the products.
        up_bias, down_bias: (experts, 2I) and (experts, H), or None.
        transposed: ``up`` is (experts, H, 2I), ``down`` (experts, I, H), as gpt-oss has them.
        saved_format: what the first product is quantized to until the backward, along its rows:
            "mxfp8" keeps half the bytes, and rounds gradients once more; None: as it is.

    Returns (tokens, H) in the dtype of ``x``, or that of torch.autocast. Until the backward, x, the
    routing and the first product (R, 2I) are kept, beside what the caller has: not the second
    product, as the gradient of ``weights`` is that of its input, ``<dA', A>``. Tokens are
    gathered and quantized again in the backward. Sums have the same order in every run.

    Raises ValueError or TypeError as :func:`blockscale.nn.linear`, and where shapes do not fit.

    Source: Guo et al., "SonicMoE", arXiv 2512.14080 (what is kept, and the gradient of weights).
    """
    held = ExpertParameters(up, down, up_bias, down_bias, gate)
    routed = routing if isinstance(routing, Routing) else (None, None, routing, None)
    tensors = x, weights, *held, *routed
    key = None
    if type(activation) is GatedActivation and isinstance(saved_format, str | None):
        others = activation, bool(transposed), saved_format, isinstance(routing, Routing)
        key = call_key(recipe, tensors, *others)
    known = None if key is None else find(key)
    if known is not None:
        return _Experts.apply(*known, *tensors)  # a key is of eager calls alone
    check_experts(x, weights, routing, held, recipe, transposed, activation.interleaved)
    dtype = output_dtype(x)
    check_saved_format(saved_format, dtype)
    has_rows = x.numel() > 0 and (weights is None or weights.numel() > 0)
    if not has_rows:
        recipe = saved_format = None  # there is nothing to quantize
    activation = activation if recipe is None else exact(activation)
    # inside of autograd's function none is enabled
    how = ExpertsConfig(
        recipe, activation, dtype, transposed, saved_format, torch.is_grad_enabled()
    )
    if is_transformed():
        return _TransformedExperts.apply(how, *tensors)
    launches = None
    if key is not None:
        if recipe is not None and not recipe.high_precision:
            launches = Launches(recipe)
        keep(key, (how, launches))
    return apply(_Experts, (up, down, gate), how, launches, *tensors)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: ExpertsConfig, launches: Launches | None, *tensors: Any) -> Tensor:
        call, needs = Call.of(how, tensors, launches), (False,) * len(tensors)
        if how.grad_enabled:
            needs = ctx.needs_input_grad[2:]
        of_x, of_a = experts_backward.dgrads(needs)
        ctx.site = observing.site()
        h = _first_product(call, dgrad=of_x)
        y = _second_product(call, h, dgrad=of_a)
        if how.saved_format is not None and any(needs):
            h = quantize(h, how.saved_format, pad=True)
        ctx.save_for_backward(*tensors, h)
        ctx.how, ctx.launches = how, launches
        need = dict(zip(ExpertParameters._fields, needs[2:], strict=False))
        ctx.leaves = {
            name: leaf_of(name, getattr(call.held, name))
            for name in experts_backward.STACKS
            if need[name]
        }
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, h = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        main_grads = {name: open_main_grad(name, leaf) for name, leaf in ctx.leaves.items()}
        with torch.no_grad(), observing.at(ctx.site):
            call = Call.of(ctx.how, tensors, ctx.launches)
            h = h.dequantize(ctx.how.dtype) if isinstance(h, ScaledTensor) else h
            read = grad, call.x, call.weights, call.held.up, call.held.down
            if call.launches is not None and not _are_plain(h, *read):
                call = call._replace(launches=None)
            g = Rows(grad.to(ctx.how.dtype), call.tokens)
            found = experts_backward.gradients(needs, call, h, g, main_grads)
        others = (None,) * (len(needs) - len(found))
        return None, None, *refuse_double_backward(found), *others


class _TransformedExperts(torch.autograd.Function):
    """The same for torch.func, which keeps what it was given alone: the first product is computed
    again."""

    @staticmethod
    def forward(how: ExpertsConfig, *tensors: Any) -> Tensor:
        call = Call.of(how, tensors)
        return _second_product(call, _first_product(call, dgrad=False), dgrad=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.how, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        with torch.no_grad():
            call = Call.of(ctx.how, tensors)
            h = _first_product(call, dgrad=False)
            if ctx.how.saved_format is not None:
                h = quantize(h, ctx.how.saved_format, pad=True).dequantize(ctx.how.dtype)
            g = Rows(grad.to(ctx.how.dtype), call.tokens)
            found = experts_backward.gradients(needs, call, h, g)
        sources = grad, *(x for x in tensors[: len(found)] if x is not None)
        others = (None,) * (len(needs) - len(found))
        return None, *refuse_double_backward(found, *sources), *others

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        raise NotImplementedError(
            "layers of groups have no rule for torch.vmap: batches are rows of one call, as groups "
            "end where their rows do; call it in a loop where weights differ"
        )


def _first_product(call: Call, *, dgrad: bool) -> Tensor:
    """``dgrad``: what it reads has a gradient."""
    return call.multiply(Rows(call.x, call.tokens), "up", dgrad=dgrad)


def _second_product(call: Call, h: Tensor, *, dgrad: bool) -> Tensor:
    """Of the first one's, and combined."""
    y = call.multiply(Activated(call.how.activation, h), "down", dgrad=dgrad)
    return call.combined(y, call.weights, call.how.dtype)


def _are_plain(h: Tensor, *others: Tensor | None) -> bool:
    """Whether nothing looks on, and hooks gave back what was saved, where it was."""
    device = h.device
    return unwatched() and all(
        x is None or (is_plain(x) and x.device == device) for x in (h, *others)
    )
