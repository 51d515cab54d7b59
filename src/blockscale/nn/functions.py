"""A quantized linear layer as autograd knows it: by tensors, by a plan, for compilers, and for
torch.func."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from . import observing, passes
from .double_backward import refuse_double_backward
from .layer_ops import linear_backward, linear_fprop
from .layer_plan import LayerPlan, Metadata
from .main_grad import leaf_of, open_main_grad
from .quantize_launches import Parts
from .recipe import Recipe
from .seeds import LayerSeed, numbers_of, seed_of_numbers

__all__ = ["CompiledLinear", "PlannedLinear", "QuantizedLinear", "TransformedLinear"]


def _save_metadata(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    seed: LayerSeed | None,
) -> None:
    dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
    ctx.about, ctx.seed = Metadata(recipe, x.shape, dtypes), numbers_of(seed)[0]


class QuantizedLinear(torch.autograd.Function):
    """Keeps x quantized by columns. ``dgrad`` and ``wgrad``: whether these products will follow."""

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
        seed: LayerSeed | None,
    ) -> Tensor:
        ctx.site = observing.site()
        y, x_kept, scalar = passes.fprop(x, weight, bias, recipe, out_dtype, wgrad, dgrad, seed)
        # the weight itself: whoever gathers it anew for the backward frees it until then
        ctx.save_for_backward(
            x_kept if wgrad else None,
            weight if dgrad else None,
            scalar if dgrad else None,
            # the step, too: checkpointing repeats the forward for what is saved, by another one
            numbers_of(seed)[1],
        )
        ctx.leaf = leaf_of("weight", weight) if wgrad else None
        _save_metadata(ctx, x, weight, bias, recipe, seed)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # before it is told where this is: checkpoints call the layer anew for what is saved
        x, weight, scalar, step = ctx.saved_tensors
        main_grad = open_main_grad("weight", ctx.leaf)
        with torch.no_grad(), observing.at(ctx.site):
            about = ctx.about._replace(seed=seed_of_numbers(ctx.seed, step))
            given = ctx.needs_input_grad[:3], about, grad
            gradients = passes.gradients(*given, x, weight, scalar, main_grad=main_grad)
        return *refuse_double_backward(gradients), None, None, None, None, None


class PlannedLinear(torch.autograd.Function):
    """The same by a plan: what is quantized is kept as its parts, and no tensor is made of them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: LayerPlan,
        dgrad: bool,
        seed: LayerSeed | None,
    ) -> Tensor:
        ctx.site = observing.site()
        y, (columns, scalar) = plan.forward(x, weight, bias, dgrad=dgrad, seed=seed)
        numbers, step = numbers_of(seed)
        ctx.save_for_backward(
            *(weight if dgrad else None, scalar if dgrad else None),
            *((None, None, None) if columns is None else columns),
            step,
        )
        ctx.plan, ctx.seed = plan, numbers
        ctx.leaf = None if columns is None else leaf_of("weight", weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, needs = ctx.plan, ctx.needs_input_grad[:3]
        weight, scalar, data, scale, x_scalar, step = ctx.saved_tensors
        seed = seed_of_numbers(ctx.seed, step)
        kept = None if data is None else Parts(data, scale, x_scalar), scalar
        if weight is not None and weight.stride(-1) != 1:  # hooks of saved tensors may give it so
            weight = weight.contiguous()
        main_grad, gradients = open_main_grad("weight", ctx.leaf), None
        if not torch.is_grad_enabled():  # else they are refused
            with observing.at(ctx.site):
                gradients = plan.backward(needs, grad, kept, weight, main_grad, seed)
        if gradients is None:
            with torch.no_grad(), observing.at(ctx.site):
                x = plan.kept_tensor(kept)
                about = plan.metadata._replace(seed=seed)
                gradients = passes.gradients(
                    *(needs, about, grad, x, weight, scalar), main_grad=main_grad
                )
            gradients = refuse_double_backward(gradients)
        return *gradients, None, None, None


class CompiledLinear(torch.autograd.Function):
    """The same by the fewest ops, for compilers. No product is in high precision."""

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
        seed: LayerSeed | None,
    ) -> Tensor:
        matrix = passes.matrix_of(x)
        rows, columns = passes.quantized_activations(
            matrix, recipe, rows=True, columns=wgrad, seed=seed
        )
        assert rows is not None
        y, *scalar = linear_fprop(
            rows.qdata,
            rows.qscale,
            rows.global_scale,
            rows.layout_name,
            list(matrix.shape),
            x.dtype,
            weight,
            bias,
            recipe.text,
            out_dtype,
            wgrad,
            *numbers_of(seed),
        )
        ctx.save_for_backward(
            weight if dgrad else None,
            scalar[0] if dgrad and scalar else None,
            None if columns is None else columns.qdata,
            None if columns is None else columns.qscale,
            None if columns is None else columns.global_scale,
            numbers_of(seed)[1],
        )
        ctx.x_layout = rows.layout_name
        _save_metadata(ctx, x, weight, bias, recipe, seed)
        return passes.unflatten_rows(y, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dgrad, wgrad, bias_grad = ctx.needs_input_grad[:3]
        recipe, x_shape, (x_dtype, w_dtype, bias_dtype), _ = ctx.about
        weight, scalar, data, scale, x_scalar, step = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        g = passes.matrix_of(grad)
        if dgrad or wgrad:
            made = linear_backward(
                g,
                data,
                scale,
                x_scalar,
                ctx.x_layout,
                [g.shape[0], x_shape[-1]],
                x_dtype,
                weight,
                scalar,
                w_dtype,
                recipe.text,
                dgrad,
                wgrad,
                ctx.seed,
                step,
            )
            if dgrad:
                grad_x = made[0].reshape(x_shape)
            if wgrad:
                grad_weight = made[-1]
        if bias_grad:
            grad_bias = g.sum(0, dtype=torch.float32).to(bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


class TransformedLinear(torch.autograd.Function):
    """The same for torch.func, which keeps plain tensors only: x is quantized by columns later."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        out_dtype: torch.dtype,
        dgrad: bool,
        wgrad: bool,
        seed: LayerSeed | None,
    ) -> Tensor:
        return passes.fprop(x, weight, bias, recipe, out_dtype, False, False, seed)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, recipe, *_, seed = inputs
        ctx.save_for_backward(x, weight, numbers_of(seed)[1])
        _save_metadata(ctx, x, weight, bias, recipe, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, step = ctx.saved_tensors
        about = ctx.about._replace(seed=seed_of_numbers(ctx.seed, step))
        with torch.no_grad():
            rows, needs, recipe = passes.matrix_of(x), ctx.needs_input_grad[:3], ctx.about.recipe
            columns = needs[1] and passes.quantized_products(recipe)["wgrad"]
            kept = passes.quantized_activations(
                rows, recipe, rows=False, columns=columns, seed=about.seed
            ).columns
            x_kept = rows if kept is None else kept
            gradients = passes.gradients(needs, about, grad, x_kept, weight, None)
        return *refuse_double_backward(gradients, grad, x, weight), None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Samples are rows of one product where they share the weight, else products of their own:
        so are those whose format has a global scale, and what is rounded by the numbers of rows.
        Each has the bits of its own call.
        """
        given, tree = tree_flatten(inputs)  # the seed has a tensor, too
        x_dim, *others = dims = tree_leaves(in_dims)
        x, recipe = inputs[0], inputs[3]
        shared = x_dim is not None and not any(dim is not None for dim in others)
        depends = recipe.format_of("activations").has_global_scale or recipe.is_random
        if shared and not depends:
            return TransformedLinear.apply(x.movedim(x_dim, 0), *inputs[1:]), 0
        alone = []
        for i in range(info.batch_size):
            of_sample = [
                v if dim is None else v.select(dim, i) for v, dim in zip(given, dims, strict=True)
            ]
            alone.append(TransformedLinear.apply(*tree_unflatten(of_sample, tree)))
        return torch.stack(alone), 0
