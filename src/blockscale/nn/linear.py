"""A linear layer whose three products are block-scaled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..gemm import gemm
from ..quantize_checks import DTYPES
from ..tensor import ScaledTensor
from ..watching import has_tangent, is_dtensor, is_transformed
from .double_backward import refuse_double_backward
from .forms import Forms, quantize_forms
from .launches import Parts
from .layer_plan import LayerPlan, Metadata, find_plan, make_plan, plan_key
from .output_dtype import output_dtype
from .recipe import PRODUCTS, Recipe
from .reuse import forget_weights, hint_at_reuse, quantized_weight

__all__ = ["Linear", "check_operands", "linear", "output_dtype", "unflatten_rows"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: Recipe) -> Tensor:
    """``x @ weight.T + bias`` with products quantized as ``recipe`` says, differentiable once.

    Args:
        x: (..., K), float32, bfloat16 or float16.
        weight: (N, K), the high-precision master. It is quantized in every forward and, for the
            gradient of ``x``, in the backward; :func:`blockscale.reuse_weights` avoids that.
        bias: (N,) or None.

    Returns (..., N) in the dtype of ``x``, or that of torch.autocast where it is on. Blocks run
    along the contraction of each product: fprop x and w by rows; dgrad g by rows, w by columns;
    wgrad g and x by columns. ``x`` and its gradient are read once for both of their forms.
    Dimensions that are no multiple of a block are padded with zeros. Until the backward, x is kept
    quantized by columns, and ``weight`` itself, as torch.nn.functional.linear keeps it.

    >>> y = bs.nn.linear(torch.randn(8, 64), torch.randn(32, 64), recipe=bs.Recipe("mxfp8"))

    Raises ValueError or TypeError as torch.nn.functional.linear and :func:`blockscale.quantize`,
    and NotImplementedError for second derivatives and forward-mode differentiation.
    """
    key = plan_key(x, weight, bias, recipe)
    plan = find_plan(key)
    if plan is not None:
        return _planned(plan, x, weight, bias)
    _check(x, weight, bias)
    out_dtype = output_dtype(x)
    if not (x.numel() and weight.numel()):  # nothing to quantize, and nothing to round
        b = None if bias is None else bias.to(out_dtype)
        return torch.nn.functional.linear(x.to(out_dtype), weight.to(out_dtype), b)
    if weight.stride(-1) != 1:  # transposed, as torch's orthogonal parametrization makes it
        weight, key = weight.contiguous(), None
    trains = torch.is_grad_enabled()
    dgrad, wgrad = trains and x.requires_grad, trains and weight.requires_grad
    plan = make_plan(key, x, weight, bias, recipe, out_dtype, columns=wgrad)
    if plan is not None:
        return _planned(plan, x, weight, bias)
    if not (dgrad or wgrad or "fprop" in recipe.high_precision):
        hint_at_reuse(weight)
    function = _TransformedLinear if is_transformed() else _Linear
    return function.apply(x, weight, bias, recipe, out_dtype, dgrad, wgrad)


def _planned(plan: LayerPlan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The layer, by the launches of a call like this one."""
    trains = torch.is_grad_enabled()
    dgrad, wgrad = trains and x.requires_grad, trains and weight.requires_grad
    if not (dgrad or wgrad):
        hint_at_reuse(weight)
        if not (trains and bias is not None and bias.requires_grad):
            return plan.forward(x, weight, bias)[0]
    return _PlannedLinear.apply(x, weight, bias, plan, dgrad)


def unflatten_rows(y: Tensor, x: Tensor) -> Tensor:
    """Rows of a product with the leading dimensions of ``x``, not as a view: one that an
    autograd.Function makes refuses in-place operations, and hooks of FSDP."""
    if x.dim() == 2:
        return y
    return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_operands(x, weight, bias)
    if has_tangent(x, weight, bias):
        raise NotImplementedError(
            "blockscale.nn.linear has no forward-mode derivative (jvp, jacfwd, dual tensors); "
            "differentiate in reverse (backward, torch.func.grad), or leave the layer in torch.nn"
        )
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"{name}: got {tensor.dtype}; expected one of {', '.join(map(str, DTYPES))}: cast "
                "the model and its inputs, or leave the layer in torch.nn (filter_fn)"
            )


def check_operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise unless these are tensors that a layer can multiply and add, in rows."""
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if is_dtensor(tensor):
            raise TypeError(
                f"{name}: is a DTensor, whose shards cannot be quantized one by one in general; "
                "use FSDP, or call .full_tensor() or .to_local() first"
            )
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise NotImplementedError(
            "torch.jit.trace cannot record block-scaled products; use torch.export or torch.compile"
        )
    if x.is_nested or x.is_sparse:
        raise TypeError(
            f"x: got a {'nested' if x.is_nested else 'sparse'} tensor; expected a dense one: call "
            "the layer with its values, or leave it in torch.nn (filter_fn)"
        )
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x, weight: got {tuple(x.shape)} and {tuple(weight.shape)}; expected (..., K), (N, K)"
        )
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise ValueError(f"bias: got {tuple(bias.shape)}; expected ({weight.shape[0]},)")


def _quantized_products(recipe: Recipe) -> dict[str, bool]:
    """Whether each product is quantized."""
    return {product: product not in recipe.high_precision for product in PRODUCTS}


def _quantized_activations(x: Tensor, recipe: Recipe, *, rows: bool, columns: bool) -> Forms:
    name = recipe.format_of("activations").name
    return quantize_forms(x, name, recipe.scale_rounding, rows=rows, columns=columns)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _fprop(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    out_dtype: torch.dtype,
    wgrad: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The product; ``x`` as wgrad reads it, made only if ``wgrad`` follows; and the global scale of
    the weight."""
    quantized = _quantized_products(recipe)
    rows = _rows(x)
    forms = _quantized_activations(
        rows, recipe, rows=quantized["fprop"], columns=wgrad and quantized["wgrad"]
    )
    scalar = None
    if forms.rows is not None:
        name = recipe.format_of("weights").name
        w = quantized_weight(weight, name, recipe.scale_rounding, rows=True).rows
        assert w is not None
        y, scalar = gemm(forms.rows, w.mT, out_dtype, bias=bias), w.global_scale
    else:
        y = rows.to(out_dtype) @ weight.to(out_dtype).mT
        y = y if bias is None else y + bias.to(out_dtype)
    y = unflatten_rows(y, x)
    return y, rows if forms.columns is None else forms.columns, scalar


def _gradients(
    needs: Sequence[bool],
    about: Metadata,
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    global_scale: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Of x, weight and bias. ``x`` and the weight's ``global_scale`` are those of ``_fprop``."""
    dgrad, wgrad, bias_grad = needs
    recipe, x_shape, (x_dtype, w_dtype, bias_dtype) = about
    quantized = _quantized_products(recipe)
    g = _rows(grad)
    rows, columns = quantize_forms(
        g,
        recipe.format_of("gradients").name,
        recipe.scale_rounding,
        rows=dgrad and quantized["dgrad"],
        columns=wgrad and quantized["wgrad"],
    )
    grad_x = grad_weight = grad_bias = None
    if dgrad:
        assert weight is not None
        grad_x = _dgrad(g if rows is None else rows, weight, global_scale, recipe, x_dtype)
        grad_x = grad_x.reshape(x_shape)
    del rows  # the peak of memory is in the product to come
    if wgrad:
        assert x is not None
        grad_weight = _wgrad(g if columns is None else columns, x, w_dtype)
    if bias_grad:
        grad_bias = g.sum(0, dtype=torch.float32).to(bias_dtype)
    return grad_x, grad_weight, grad_bias


def _dgrad(
    g: Tensor, weight: Tensor, global_scale: Tensor | None, recipe: Recipe, dtype: torch.dtype
) -> Tensor:
    """``g`` is quantized by rows, or plain."""
    if not isinstance(g, ScaledTensor):
        return (g @ weight.to(g.dtype)).to(dtype)
    how = recipe.format_of("weights").name, recipe.scale_rounding
    w = quantized_weight(weight, *how, columns=True, global_scale=global_scale).columns
    assert w is not None
    return gemm(g, w, dtype)


def _wgrad(g: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Both are quantized by columns, or plain."""
    if isinstance(g, ScaledTensor) and isinstance(x, ScaledTensor):
        return gemm(g.mT, x, dtype)
    return (g.mT @ x.to(g.dtype)).to(dtype)


def _save_metadata(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe
) -> None:
    dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
    ctx.about = Metadata(recipe, x.shape, dtypes)


class _Linear(torch.autograd.Function):
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
    ) -> Tensor:
        y, x_kept, scalar = _fprop(x, weight, bias, recipe, out_dtype, wgrad)
        # the weight itself: whoever gathers it anew for the backward frees it until then
        ctx.save_for_backward(
            x_kept if wgrad else None,
            weight if dgrad else None,
            scalar if dgrad else None,
        )
        _save_metadata(ctx, x, weight, bias, recipe)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            gradients = _gradients(ctx.needs_input_grad[:3], ctx.about, grad, *ctx.saved_tensors)
        return *refuse_double_backward(gradients), None, None, None, None


class _PlannedLinear(torch.autograd.Function):
    """The same by a plan: what is quantized is kept as its parts, and no tensor is made of them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: LayerPlan,
        dgrad: bool,
    ) -> Tensor:
        y, (columns, scalar) = plan.forward(x, weight, bias)
        ctx.save_for_backward(
            *(weight if dgrad else None, scalar if dgrad else None),
            *((None, None, None) if columns is None else columns),
        )
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, needs = ctx.plan, ctx.needs_input_grad[:3]
        weight, scalar, data, scale, x_scalar = ctx.saved_tensors
        kept = None if data is None else Parts(data, scale, x_scalar), scalar
        if weight is not None and weight.stride(-1) != 1:  # hooks of saved tensors may give it so
            weight = weight.contiguous()
        gradients = None
        if not torch.is_grad_enabled():  # else they are refused
            gradients = plan.backward(needs, grad, kept, weight)
        if gradients is None:
            with torch.no_grad():
                x = plan.kept_tensor(kept)
                gradients = _gradients(needs, plan.metadata, grad, x, weight, scalar)
            gradients = refuse_double_backward(gradients)
        return *gradients, None, None


class _TransformedLinear(torch.autograd.Function):
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
    ) -> Tensor:
        return _fprop(x, weight, bias, recipe, out_dtype, False)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, recipe, *_ = inputs
        ctx.save_for_backward(x, weight)
        _save_metadata(ctx, x, weight, bias, recipe)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        with torch.no_grad():
            rows, needs, recipe = _rows(x), ctx.needs_input_grad[:3], ctx.about.recipe
            columns = needs[1] and _quantized_products(recipe)["wgrad"]
            kept = _quantized_activations(rows, recipe, rows=False, columns=columns).columns
            x_kept = rows if kept is None else kept
            gradients = _gradients(needs, ctx.about, grad, x_kept, weight, None)
        return *refuse_double_backward(gradients, grad, x, weight), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Samples are rows of one product where they share the weight, else products of their own.

        Either way each row has the bits of its own call, but for NVFP4 where samples share the
        weight: its global scale is then that of all of them.
        """
        x_dim, *others = in_dims
        if x_dim is not None and not any(dim is not None for dim in others):
            x, *rest = inputs
            return _TransformedLinear.apply(x.movedim(x_dim, 0), *rest), 0
        alone = [
            _TransformedLinear.apply(
                *(
                    v if dim is None else v.select(dim, i)
                    for v, dim in zip(inputs, in_dims, strict=True)
                )
            )
            for i in range(info.batch_size)
        ]
        return torch.stack(alone), 0


class Linear(torch.nn.Linear):
    """torch.nn.Linear with block-scaled products.

    >>> layer = bs.nn.Linear(512, 256, recipe=bs.Recipe("mxfp8"))
    >>> y = layer(torch.randn(8, 512))

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

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        forget_weights()  # torch.utils.swap_tensors refuses a weight that is remembered
        super()._load_from_state_dict(*args, **kwargs)
        forget_weights()  # what was loaded may be the shards of a weight that is gathered

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}"
