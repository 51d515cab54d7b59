"""Both passes of a linear layer, by quantized tensors: what no plan launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..gemm import gemm
from ..tensor import ScaledTensor
from . import observing
from .forms import Forms, quantize_forms
from .layer_plan import Gradients, Metadata
from .main_grad import add_product
from .operand import Operand
from .recipe import PRODUCTS, PRODUCTS_OF, Recipe
from .reuse import quantized_weight
from .seeds import LayerSeed, seed_of

__all__ = [
    "data_gradient",
    "fprop",
    "gradients",
    "matrix_of",
    "multiply",
    "quantized_activations",
    "quantized_products",
    "unflatten_rows",
    "weight_gradient",
]

#: ``quantize_forms``, or ``quantized_weight``, which takes what ``reuse_weights`` keeps.
QuantizeWeight = Callable[..., Forms]


def quantized_products(recipe: Recipe) -> dict[str, bool]:
    """Whether each product is quantized."""
    return {product: product not in recipe.high_precision for product in PRODUCTS}


def quantized_activations(
    x: Tensor, recipe: Recipe, *, rows: bool, columns: bool, seed: LayerSeed | None = None
) -> Forms:
    how = recipe.operand("activations")
    forms = quantize_forms(x, how, rows=rows, columns=columns, seed=seed_of(seed, "activations"))
    _tell("activations", x, how, forms)
    return forms


def _tell(role: str, x: Tensor, how: Operand, forms: Forms) -> None:
    """An observer, of forms; of those that were transformed, without what they were made of."""
    products = PRODUCTS_OF[role]
    for product, form, each in zip(products, forms, (how.rows, how.columns), strict=True):
        observing.saw(role, x if each.hadamard is None else None, **{product: form})


def matrix_of(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def fprop(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    out_dtype: torch.dtype,
    wgrad: bool,
    dgrad: bool,
    seed: LayerSeed | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The product; ``x`` as wgrad reads it, made only if ``wgrad`` follows; and the global scale of
    the weight. ``dgrad``: a backward will ask for the weight by columns."""
    quantized = quantized_products(recipe)
    rows = matrix_of(x)
    columns = wgrad and quantized["wgrad"]
    forms = quantized_activations(rows, recipe, rows=quantized["fprop"], columns=columns, seed=seed)
    scalar = None
    if forms.rows is not None:
        quantize_weight = partial(
            quantized_weight, dgrad=dgrad and quantized["dgrad"], seed=seed_of(seed, "weights")
        )
        y, scalar = multiply(forms.rows, weight, bias, recipe, out_dtype, quantize_weight)
    else:
        y = rows.to(out_dtype) @ weight.to(out_dtype).mT
        y = y if bias is None else y + bias.to(out_dtype)
    y = unflatten_rows(y, x)
    return y, rows if forms.columns is None else forms.columns, scalar


def multiply(
    x: ScaledTensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    out_dtype: torch.dtype,
    quantize_weight: QuantizeWeight,
) -> tuple[Tensor, Tensor | None]:
    """The product of quantized rows, and the global scale of the weight."""
    operand = recipe.operand("weights")
    w = quantize_weight(weight, operand, rows=True).rows
    assert w is not None
    _tell("weights", weight, operand, Forms(rows=w))
    return gemm(x, w.mT, out_dtype, bias=bias), w.global_scale


def unflatten_rows(y: Tensor, x: Tensor) -> Tensor:
    """Rows of a product with the leading dimensions of ``x``, not as a view: one that an
    autograd.Function makes refuses in-place operations, and hooks of FSDP."""
    if x.dim() == 2:
        return y
    return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))


def gradients(
    needs: Sequence[bool],
    about: Metadata,
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    global_scale: Tensor | None,
    quantize_weight: QuantizeWeight = quantized_weight,
    main_grad: Tensor | None = None,
) -> Gradients:
    """Of x, weight and bias. ``x`` and the weight's ``global_scale`` are those of ``fprop``. The
    weight's is added to ``main_grad``, if there is one, and is None."""
    dgrad, wgrad, bias_grad = needs
    recipe, x_shape, (x_dtype, w_dtype, bias_dtype), seed = about
    quantized = quantized_products(recipe)
    g = matrix_of(grad)
    operand = recipe.operand("gradients")
    rows, columns = forms = quantize_forms(
        g,
        operand,
        rows=dgrad and quantized["dgrad"],
        columns=wgrad and quantized["wgrad"],
        seed=seed_of(seed, "gradients"),
    )
    _tell("gradients", g, operand, forms)
    del forms
    grad_x = grad_weight = grad_bias = None
    if dgrad:
        assert weight is not None
        if recipe.operand("weights").is_random:
            quantize_weight = partial(quantize_weight, seed=seed_of(seed, "weights"))
        grad_x = data_gradient(
            g if rows is None else rows, weight, global_scale, recipe, x_dtype, quantize_weight
        )
        grad_x = grad_x.reshape(x_shape)
    del rows  # the peak of memory is in the product to come
    if wgrad:
        assert x is not None
        grad_weight = weight_gradient(g if columns is None else columns, x, w_dtype, main_grad)
    if bias_grad:
        grad_bias = g.sum(0, dtype=torch.float32).to(bias_dtype)
    return grad_x, grad_weight, grad_bias


def data_gradient(
    g: Tensor,
    weight: Tensor,
    global_scale: Tensor | None,
    recipe: Recipe,
    dtype: torch.dtype,
    quantize_weight: QuantizeWeight,
) -> Tensor:
    """``g`` is quantized by rows, or plain."""
    if not isinstance(g, ScaledTensor):
        return (g @ weight.to(g.dtype)).to(dtype)
    operand = recipe.operand("weights")
    scale = global_scale if operand.has_one_global_scale else None
    w = quantize_weight(weight, operand, columns=True, global_scale=scale).columns
    assert w is not None
    _tell("weights", weight, operand, Forms(columns=w))
    return gemm(g, w, dtype)


def weight_gradient(
    g: Tensor, x: Tensor, dtype: torch.dtype, main_grad: Tensor | None = None
) -> Tensor | None:
    """Both are quantized by columns, or plain. None: it was added to ``main_grad``."""
    if isinstance(g, ScaledTensor) and isinstance(x, ScaledTensor):
        if main_grad is None:
            return gemm(g.mT, x, dtype)
        gemm(g.mT, x, out=main_grad, accumulate=True)
        return None
    x = x.to(g.dtype)
    if main_grad is None:
        return (g.mT @ x).to(dtype)
    add_product(main_grad, g.mT, x)
    return None
