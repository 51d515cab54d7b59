"""A layer's passes as the ops that compilers see: one for each.

What quantizes the activations is an op of its own, so that a compiler calls it once for layers that
read the same. Weights and gradients are quantized inside: each op that compiled code calls takes
the host longer than a launch. What ``reuse_weights`` keeps is not taken.
"""

from __future__ import annotations

import json
from functools import lru_cache, partial

import torch
from torch import Tensor

from ..formats import Format
from ..kernels.common.gpu import Gpu, Unsupported
from ..kernels.common.runtime import Described, describe, gpu_of
from ..ops.operand_layout import operand_layout
from ..ops.operation import operation
from ..tensor import ScaledTensor
from . import passes
from .forms import quantize_forms
from .layer_plan import BackwardPlan, FpropPlan, Layer, Metadata
from .method_launches import OperandLaunch
from .plan_cache import planned
from .recipe import Recipe
from .seeds import seed_of, seed_of_numbers

__all__ = ["activation_of", "linear_backward", "linear_fprop", "recipe_of"]


@lru_cache
def recipe_of(text: str) -> Recipe:
    """The recipe that has this ``text``, as ops take it."""
    return Recipe.from_dict(json.loads(text))


# --- fprop ----------------------------------------------------------------------------------------


def _fake_fprop(
    x_data: Tensor, x_shape: list[int], weight: Tensor, recipe: str, out_dtype: torch.dtype
) -> list[Tensor]:
    y = x_data.new_empty([x_shape[0], weight.shape[0]], dtype=out_dtype)
    if not recipe_of(recipe).format_of("weights").has_global_scale:
        return [y]
    return [y, x_data.new_empty((), dtype=torch.float32)]


@operation(_fake_fprop)
def linear_fprop(
    x_data: Tensor,
    x_scale: Tensor,
    x_global: Tensor | None,
    x_layout: str,
    x_shape: list[int],
    x_dtype: torch.dtype,
    weight: Tensor,
    bias: Tensor | None,
    recipe: str,
    out_dtype: torch.dtype,
    wgrad: bool,
    seed: list[int] | None = None,
    step: Tensor | None = None,
) -> list[Tensor]:
    """``x @ weight.T + bias``, and the weight's global scale where its format has one.

    ``x`` (M, K) is quantized along -1, and with ``wgrad`` was along -2 by the same kernel. Its
    scales lie as the graph was recorded for, which may have been on another device. ``recipe`` is
    its text, ``seed`` and ``step`` are those of a :class:`LayerSeed`.
    """
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    metadata = Metadata(recipe_of(recipe), torch.Size(x_shape), (x_dtype, weight.dtype, None))
    layer = Layer(metadata, describe(weight), out_dtype, weight.device, reuses=False)
    of_layer, found = seed_of_numbers(seed, step), None
    gpu = _common_gpu(layer, x_data, bias)
    if gpu is not None:
        key = "fprop", gpu, layer, x_layout, wgrad, describe(bias)
        found = planned(key, lambda: _plan_fprop(layer, x_layout, wgrad, bias))
    if found is not None:
        x, plan = found
        rows = x.parts_of(x_data, x_scale, x_global, -1)
        y, scalar = plan(rows, weight, bias, seed=of_layer)
    else:
        form = activation_of(layer.metadata, x_layout, (x_data, x_scale, x_global), -1)
        quantize_weight = partial(quantize_forms, seed=seed_of(of_layer, "weights"))
        y, scalar = passes.multiply(form, weight, bias, metadata.recipe, out_dtype, quantize_weight)
    return [y] if scalar is None else [y, scalar]


def _plan_fprop(
    layer: Layer, x_layout: str, wgrad: bool, bias: Tensor | None
) -> tuple[OperandLaunch, FpropPlan]:
    x = _x_quantizer(layer, x_layout, wgrad)
    return x, FpropPlan(layer, x, bias)


# --- dgrad and wgrad ------------------------------------------------------------------------------


def _fake_backward(
    grad: Tensor, x_shape: list[int], x_dtype: torch.dtype, w_dtype: torch.dtype,
    dgrad: bool, wgrad: bool,
) -> list[Tensor]:  # fmt: skip
    rows, k = x_shape
    of_x = [grad.new_empty([rows, k], dtype=x_dtype)] * dgrad
    return of_x + [grad.new_empty([grad.shape[1], k], dtype=w_dtype)] * wgrad


@operation(_fake_backward)
def linear_backward(
    grad: Tensor,
    x_data: Tensor | None,
    x_scale: Tensor | None,
    x_global: Tensor | None,
    x_layout: str,
    x_shape: list[int],
    x_dtype: torch.dtype,
    weight: Tensor | None,
    w_global: Tensor | None,
    w_dtype: torch.dtype,
    recipe: str,
    dgrad: bool,
    wgrad: bool,
    seed: list[int] | None = None,
    step: Tensor | None = None,
) -> list[Tensor]:
    """The gradients of x (M, K) and of weight (N, K), those that are asked for.

    ``grad`` is (M, N). dgrad reads ``weight`` and takes the global scale that fprop found; wgrad
    reads ``x``, quantized along -2.
    """
    n, k, device = grad.shape[1], x_shape[1], grad.device
    seen: Described = torch.Size((n, k)), (k, 1), w_dtype, 0
    if weight is not None:
        weight = weight if weight.stride(-1) == 1 else weight.contiguous()
        seen = describe(weight)
    metadata = Metadata(recipe_of(recipe), torch.Size(x_shape), (x_dtype, w_dtype, None))
    layer, needs = Layer(metadata, seen, grad.dtype, device, reuses=False), (dgrad, wgrad, False)
    of_layer, found = seed_of_numbers(seed, step), None
    gpu = _common_gpu(layer, x_data, weight)
    if gpu is not None:
        key = "backward", gpu, layer, x_layout, dgrad, wgrad
        found = planned(key, lambda: _plan_backward(layer, x_layout, dgrad, wgrad))
    if found is not None:
        x, plan = found
        columns = None
        if x_data is not None and x_scale is not None:
            columns = x.parts_of(x_data, x_scale, x_global, -2)
        made = plan(grad, (columns, w_global), weight, False, seed=of_layer)
    else:
        form = None
        if x_data is not None and x_scale is not None:
            form = activation_of(layer.metadata, x_layout, (x_data, x_scale, x_global), -2)
        about = metadata._replace(seed=of_layer)
        made = passes.gradients(needs, about, grad, form, weight, w_global, quantize_forms)
    return [x for x in made if x is not None]


def _plan_backward(
    layer: Layer, x_layout: str, dgrad: bool, wgrad: bool
) -> tuple[OperandLaunch, BackwardPlan]:
    x = _x_quantizer(layer, x_layout, wgrad)
    return x, BackwardPlan(layer, x, dgrad, wgrad)


# --- both -----------------------------------------------------------------------------------------


def _common_gpu(layer: Layer, *others: Tensor | None) -> Gpu | None:
    """The GPU that all operands are on, which may have a plan; it stands in the plan's key, as
    :func:`blockscale.warm` puts one in its place whose kernels do nothing."""
    same = all(x is None or x.device == layer.device for x in others)
    return gpu_of(layer.device) if same else None


def _x_quantizer(layer: Layer, x_layout: str, columns: bool) -> OperandLaunch:
    """What quantized ``x`` where a graph was recorded on a device like this one."""
    layout = operand_layout(_x_format(layer.metadata).name, layer.device).layout
    if x_layout != layout:
        raise Unsupported(
            f"x_layout: products read {layout}, the graph was recorded for {x_layout}"
        )
    return layer.x_quantizer(rows=True, columns=columns)


def _x_format(metadata: Metadata) -> Format:
    return metadata.recipe.format_of("activations")


def activation_of(
    metadata: Metadata, x_layout: str, parts: tuple[Tensor, Tensor, Tensor | None], axis: int
) -> ScaledTensor:
    """What the parts of ``x`` are of."""
    data, scale, global_scale = parts
    *outer, rows, k = metadata.x_shape
    operand = metadata.recipe.operand("activations")
    return ScaledTensor(
        data,
        scale,
        format=_x_format(metadata),
        shape=(
            (*outer, rows, operand.contraction(-1, k))
            if axis == -1
            else (*outer, operand.contraction(-2, rows), k)
        ),
        axis=axis,
        dtype=metadata.dtypes[0],
        layout=x_layout,
        global_scale=global_scale,
    )
