"""What both passes of a linear layer launch, found once for calls alike.

A plan is looked up by all that decides what is launched: the recipe, and how the operands lie. It
is made of the plans of the layer's quantizers and products, for calls that have passed all checks,
and gives their bytes. There is none where torch looks on, or where kernels do not do all of it:
then ``linear`` makes quantized tensors and multiplies these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.common.gpu import Unsupported
from ..kernels.common.runtime import Described, describe, gpu_of
from ..tensor import ScaledTensor
from ..watching import is_eager, is_plain, unwatched
from . import observing
from .method_launches import OperandLaunch, operand_launch
from .output_dtype import output_dtype
from .plan_cache import attempt, find, planned
from .product_launches import ProductLaunch, ProductOperand
from .quantize_launches import Asked, Parts
from .recipe import Recipe
from .seeds import LayerSeed, seed_of
from .weight_launch import WeightLaunch

__all__ = [
    "BackwardPlan",
    "FpropPlan",
    "Gradients",
    "Kept",
    "Layer",
    "LayerPlan",
    "Metadata",
    "find_plan",
    "make_plan",
    "plan_key",
]


class Metadata(NamedTuple):
    """What the backward needs to know of the forward's arguments."""

    recipe: Recipe
    x_shape: torch.Size
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None]  # of x, weight and bias
    seed: LayerSeed | None = None  # where the recipe rounds stochastically; plans are given theirs


#: What is kept of ``x`` for wgrad, and the weight's global scale, for dgrad.
Kept = tuple[Parts | None, Tensor | None]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def plan_key(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Any:
    """Calls with the same key launch the same; None where torch has to look on.

    Addresses are no part of it: what depends on them is looked up at the launch.
    """
    if not is_eager():
        return None
    if not (is_plain(x) and is_plain(weight)):
        return None
    gpu = gpu_of(x.device)
    if gpu is None:
        return None
    if bias is not None and not is_plain(bias):
        return None
    return (
        recipe,
        torch.is_grad_enabled() and weight.requires_grad,
        output_dtype(x),
        x.shape,
        x.dtype,
        x.device,
        gpu,
        weight.shape,
        weight.stride(),
        weight.dtype,
        weight.device,
        None if bias is None else (*describe(bias), bias.device),
    )


def find_plan(key: Any) -> LayerPlan | None:
    """The plan of calls with this key, if it is known by now."""
    return None if key is None else find(key)


def make_plan(
    key: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    out_dtype: torch.dtype,
    *,
    columns: bool,
) -> LayerPlan | None:
    """The plan of a call that has passed all checks, and of calls to come; None where there is
    none.

    The first call goes by it, too: torch.utils.checkpoint compares what autograd keeps in the first
    forward and in the second.
    """
    if key is None:
        return None
    return planned(key, lambda: LayerPlan(x, weight, bias, recipe, out_dtype, columns=columns))


class Layer(NamedTuple):
    """What the plans of a layer's passes are made for.

    ``reuses``: whether a weight that ``reuse_weights`` keeps quantized is taken.
    """

    metadata: Metadata
    weight: Described
    out_dtype: torch.dtype
    device: torch.device
    reuses: bool = True

    def quantizer(
        self, x: Described, role: str, *, rows: bool = False, columns: bool = False
    ) -> OperandLaunch:
        """Of an operand, as the recipe says. Raises Unsupported where no kernel does it."""
        asked = Asked.of(self.metadata.recipe, role, self.device, rows=rows, columns=columns)
        return operand_launch(x, asked)

    def weight_launch(self, axis: int) -> WeightLaunch:
        recipe = self.metadata.recipe
        return WeightLaunch(self.weight, self.device, recipe, axis, reuses=self.reuses)

    def x_quantizer(self, address: int = 0, *, rows: bool, columns: bool) -> OperandLaunch:
        """Of ``x``, a matrix at ``address``."""
        shape, k = self.metadata.x_shape, self.weight[0][1]
        matrix = _rows((shape.numel() // k, k), self.metadata.dtypes[0], address)
        return self.quantizer(matrix, "activations", rows=rows, columns=columns)


class LayerPlan:
    """Both passes of a layer; ``columns``: whether x is kept for wgrad.

    Raises ValueError or TypeError where kernels do not do all of the forward.
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        out_dtype: torch.dtype,
        *,
        columns: bool,
    ) -> None:
        if recipe.high_precision:
            raise Unsupported("high_precision: these products are torch's")
        if {weight.device, (weight if bias is None else bias).device} != {x.device}:
            raise Unsupported("weight, bias: are not on the device of x")
        dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        self.metadata = Metadata(recipe, x.shape, dtypes)
        self._layer = Layer(self.metadata, describe(weight), out_dtype, x.device)
        self._x = self._layer.x_quantizer(x.data_ptr(), rows=True, columns=columns)
        self._fprop = FpropPlan(self._layer, self._x, bias)
        self._backward: dict[tuple[bool, bool], BackwardPlan | None] = {}

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        dgrad: bool = False,
        seed: LayerSeed | None = None,
    ) -> tuple[Tensor, Kept]:
        """The product, and what is kept for the backward. ``dgrad``: that will ask for the weight
        by columns."""
        matrix = _matrix(x)
        rows, columns = self._x(matrix, None, seed_of(seed, "activations"))
        assert rows is not None
        observing.made("activations", matrix, self._x, rows, columns)
        y, global_scale = self._fprop(rows, weight, bias, dgrad=dgrad, seed=seed)
        return y, (columns, global_scale)

    def backward(
        self,
        needs: Sequence[bool],
        grad: Tensor,
        kept: Kept,
        weight: Tensor | None,
        main_grad: Tensor | None,
        seed: LayerSeed | None = None,
    ) -> Gradients | None:
        """Those of x, weight and bias that ``needs`` asks for; that of the weight is added to
        ``main_grad``, if there is one. None where torch looks on, or where kernels do not do all of
        it."""
        if not (unwatched() and is_plain(grad)):
            return None
        if weight is not None and not (
            is_plain(weight)
            and weight.shape == self._layer.weight[0]
            and weight.device == self._layer.device
        ):
            return None
        dgrad, wgrad, bias_grad = needs
        if (dgrad, wgrad) not in self._backward:
            self._backward[dgrad, wgrad] = self._plan_backward(dgrad, wgrad)
        plan = self._backward[dgrad, wgrad]
        return None if plan is None else plan(grad, kept, weight, bias_grad, main_grad, seed)

    def _plan_backward(self, dgrad: bool, wgrad: bool) -> BackwardPlan | None:
        return attempt(BackwardPlan, self._layer, self._x, dgrad, wgrad)

    def kept_tensor(self, kept: Kept) -> ScaledTensor | None:
        """What is kept of x, as a tensor."""
        columns = kept[0]
        return None if columns is None else self._x.form(self._x.restored(columns, -2), -2)


class FpropPlan:
    """The product of a layer: ``x`` is what quantized its rows.

    Raises as :class:`LayerPlan`.
    """

    def __init__(self, layer: Layer, x: OperandLaunch, bias: Tensor | None) -> None:
        shape = *layer.metadata.x_shape[:-1], layer.weight[0][0]
        self._weight = layer.weight_launch(-1)
        self._multiply = ProductLaunch(
            ProductOperand(x, -1),
            ProductOperand(self._weight.launch, -1, turned=True),
            None if bias is None else bias.detach(),
            layer.out_dtype,
            shape,
            layer.device,
        )

    def __call__(
        self,
        rows: Parts,
        weight: Tensor,
        bias: Tensor | None,
        *,
        dgrad: bool = False,
        seed: LayerSeed | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The product, and the weight's global scale."""
        w = self._weight(weight, dgrad=dgrad, seed=seed_of(seed, "weights"))
        observing.made("weights", weight, self._weight.launch, w, None)
        return self._multiply(rows, w, None if bias is None else bias.detach()), w.global_scale


class BackwardPlan:
    """The backward of a layer: ``dgrad`` and ``wgrad``, where they are asked for; ``x`` is what
    quantized its columns.

    Raises as :class:`LayerPlan`.
    """

    def __init__(self, layer: Layer, x: OperandLaunch, dgrad: bool, wgrad: bool) -> None:
        self._x, (x_dtype, w_dtype, self._bias_dtype) = x, layer.metadata.dtypes
        x_shape, device = layer.metadata.x_shape, layer.device
        self._quantize: OperandLaunch | None = None
        self._dgrad: ProductLaunch | None = None
        self._wgrad: ProductLaunch | None = None
        if not (dgrad or wgrad):
            return
        n, k = layer.weight[0]
        rows = _rows((x_shape.numel() // k, n), layer.out_dtype, 0)
        g = self._quantize = layer.quantizer(rows, "gradients", rows=dgrad, columns=wgrad)
        if dgrad:
            self._weight = layer.weight_launch(-2)
            self._one_scale = layer.metadata.recipe.operand("weights").has_one_global_scale
            operands = ProductOperand(g, -1), ProductOperand(self._weight.launch, -2)
            self._dgrad = ProductLaunch(*operands, None, x_dtype, x_shape, device)
        if wgrad:
            operands = ProductOperand(g, -2, turned=True), ProductOperand(self._x, -2)
            self._wgrad = ProductLaunch(*operands, None, w_dtype, (n, k), device)

    def __call__(
        self,
        grad: Tensor,
        kept: Kept,
        weight: Tensor | None,
        bias_grad: bool,
        main_grad: Tensor | None = None,
        seed: LayerSeed | None = None,
    ) -> Gradients:
        """The gradients of x, weight and bias; that of the weight is added to ``main_grad``, if
        there is one, and is None."""
        columns, global_scale = kept
        of_x = of_weight = of_bias = rows = g_columns = None
        g = _matrix(grad)
        if self._quantize is not None:
            rows, g_columns = self._quantize(g, None, seed_of(seed, "gradients"))
            observing.made("gradients", g, self._quantize, rows, g_columns)
        if self._dgrad is not None:
            assert rows is not None
            assert weight is not None
            scale = global_scale if self._one_scale else None
            w = self._weight(weight, scale, seed=seed_of(seed, "weights"))
            observing.made("weights", weight, self._weight.launch, None, w)
            of_x = self._dgrad(rows, w)
        del rows  # the peak of memory is in the product to come
        if self._wgrad is not None:
            assert g_columns is not None
            assert columns is not None
            x_columns = self._x.restored(columns, -2)
            if main_grad is None:
                of_weight = self._wgrad(g_columns, x_columns)
            else:
                self._wgrad.add_to(main_grad, g_columns, x_columns)
        if bias_grad:
            of_bias = g.sum(0, dtype=torch.float32).to(self._bias_dtype)
        return of_x, of_weight, of_bias


def _matrix(x: Tensor) -> Tensor:
    """Its rows, contiguous and without a gradient."""
    x = x.detach()
    return (x if x.dim() == 2 else x.reshape(-1, x.shape[-1])).contiguous()


def _rows(shape: tuple[int, int], dtype: torch.dtype, address: int) -> Described:
    """What ``_matrix`` makes of a tensor, described."""
    return torch.Size(shape), (shape[1], 1), dtype, address % 32
