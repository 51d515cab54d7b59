"""Layers of several parts, which are modules, and run as one where each part is as it was made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from ..gemm import gemm
from ..ops.operand_layout import operand_layout
from ..quantization import PLAIN
from ..tensor import ScaledTensor
from ..watching import is_transformed
from .forms import Forms
from .linear import Linear
from .passes import unflatten_rows
from .quantized import QuantizedLinear, transposed_weight
from .recipe import Recipe

__all__ = ["is_untouched", "make_forms", "multiplies_quantized", "served", "serves_quantized"]

Make = Callable[..., Sequence[ScaledTensor]]

_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"


def is_untouched(module: torch.nn.Module, cls: type) -> bool:
    """Whether its forward is that of ``cls``, and nobody wants to see it called."""
    if type(module) is not cls or "forward" in module.__dict__:
        return False
    return not (any(getattr(module, name) for name in _HOOKS) or _has_any_global_hook())


def multiplies_quantized(x: Tensor, *layers: torch.nn.Module) -> bool:
    """Whether all products of ``layers``, the first of which reads ``x``, are quantized, and may be
    made otherwise than by calling them one after another: by weights that are what they seem to be,
    and without a transform of torch.func."""
    if is_transformed() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    for layer in layers:
        if not is_untouched(layer, Linear):
            return False
        assert isinstance(layer, Linear)
        weight = layer._parameters.get("weight")
        if layer.recipe.high_precision or weight is None or weight.stride(-1) != 1:
            return False
        if not layer.recipe.is_plain:  # what producers do not do
            return False
        if not (weight.numel() and x.numel()):  # nothing to quantize
            return False
        if torch.compiler.is_compiling() and type(weight) is not torch.nn.Parameter:
            return False  # what ranks gather has ops of its own
    return True


def serves_quantized(x: Tensor, layer: torch.nn.Module) -> bool:
    """Whether ``layer`` holds a quantized weight, quantizes ``x``, and nothing has a gradient, so
    that :func:`served` may take its place."""
    if not is_untouched(layer, QuantizedLinear) or is_transformed() or not x.numel():
        return False
    assert isinstance(layer, QuantizedLinear)
    exports = torch.compiler._is_exporting_flag  # see quantized_linear
    recipe = layer.recipe
    if recipe.weight_only or torch.is_grad_enabled() or exports:
        return False
    return recipe.operand("activations").rows == PLAIN


def served(make: Make, layer: QuantizedLinear, x: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The product of what ``make`` makes along the rows of ``x``, with its leading dimensions."""
    forms = make_forms(make, layer.recipe, "activations", x.device, rows=True, columns=False)
    assert forms.rows is not None
    y = gemm(forms.rows, transposed_weight(layer.weight), out_dtype, bias=layer.bias)
    return unflatten_rows(y, x)


def make_forms(
    make: Make,
    recipe: Recipe,
    role: str,
    device: torch.device,
    *,
    rows: bool,
    columns: bool,
) -> Forms:
    """The forms that are asked for of an operand that plays this role, as ``quantize_forms`` places
    them. ``make``: of a format and, by name, arguments of :func:`blockscale.quantize`, with
    ``axes``."""
    axes = (-1,) * rows + (-2,) * columns
    if not axes:
        return Forms()
    format = recipe.format_of(role).name
    layout, k_major = operand_layout(format, device)
    made = make(
        format,
        axes=axes,
        scale_rounding=recipe.scale_rounding,
        layout=layout,
        pad=True,
        k_major=k_major,
    )
    by_axis = dict(zip(axes, made, strict=True))
    return Forms(by_axis.get(-1), by_axis.get(-2))
