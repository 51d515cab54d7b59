"""A linear layer whose three products are block-scaled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..tensor import ScaledTensor
from ..tensor_checks import DTYPES, check_is_tensor
from ..watching import is_dtensor, is_transformed, refuse_tangents
from .compiled import compiled_linear
from .functions import PlannedLinear, QuantizedLinear, TransformedLinear
from .layer_plan import LayerPlan, find_plan, make_plan, plan_key
from .main_grad import adds_to_main_grad, apply, refuse_copied
from .output_dtype import output_dtype
from .recipe import PRODUCTS, Recipe, check_recipe, check_training_recipe
from .reuse import ForgetsWeights, hint_at_reuse
from .seeds import LayerSeed, Stepping, drawn_number
from .unscripted import Unscripted

__all__ = ["Linear", "check_dtype", "check_linear", "check_operands", "check_whole", "linear"]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe,
    seed: LayerSeed | None = None,
) -> Tensor:
    """``x @ weight.T + bias`` with products quantized as ``recipe`` says, differentiable once.

    Args:
        x: (..., K), float32, bfloat16 or float16.
        weight: (N, K), the high-precision master. It is quantized in every forward and, for the
            gradient of ``x``, in the backward; :func:`blockscale.reuse_weights` avoids that. Its
            gradient is added to ``weight.main_grad``, if it has one (:class:`MainGradients`).
        bias: (N,) or None.
        seed: for recipes that round stochastically: a :class:`blockscale.nn.LayerSeed`, of a step
            of its own for each call. Layers count steps themselves.

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
        return _planned(plan, x, weight, bias, seed)
    check_linear(x, weight, bias, recipe)
    _check_seed(seed, recipe)
    out_dtype = output_dtype(x)
    if not (x.numel() and weight.numel()):  # nothing to quantize, and nothing to round
        if not (weight.numel() and adds_to_main_grad(weight)):
            b = None if bias is None else bias.to(out_dtype)
            if type(weight) not in (Tensor, torch.nn.Parameter):  # ranks' may have no values
                weight = _Zeros.apply(weight)
            return torch.nn.functional.linear(x.to(out_dtype), weight.to(out_dtype), b)
        recipe, key = replace(recipe, high_precision=PRODUCTS), None
    if weight.stride(-1) != 1:  # transposed, as torch's orthogonal parametrization makes it
        refuse_copied("weight", weight)
        weight, key = weight.contiguous(), None
    trains = torch.is_grad_enabled()
    dgrad, wgrad = trains and x.requires_grad, trains and weight.requires_grad
    plan = make_plan(key, x, weight, bias, recipe, out_dtype, columns=wgrad)
    if plan is not None:
        return _planned(plan, x, weight, bias, seed)
    if not (dgrad or wgrad or "fprop" in recipe.high_precision):
        hint_at_reuse(weight)
    given = x, weight, bias, recipe, out_dtype
    if torch.compiler.is_compiling() and not (recipe.high_precision or adds_to_main_grad(weight)):
        return compiled_linear(*given, seed)
    function = TransformedLinear if is_transformed() else QuantizedLinear
    return apply(function, (weight,), *given, dgrad, wgrad, seed)


class _Zeros(torch.autograd.Function):
    """What stands for a weight that no row is multiplied by, and passes on its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _planned(
    plan: LayerPlan, x: Tensor, weight: Tensor, bias: Tensor | None, seed: LayerSeed | None
) -> Tensor:
    """The layer, by the launches of a call like this one."""
    trains = torch.is_grad_enabled()
    dgrad, wgrad = trains and x.requires_grad, trains and weight.requires_grad
    if not (dgrad or wgrad):
        hint_at_reuse(weight)
        if not (trains and bias is not None and bias.requires_grad):
            return plan.forward(x, weight, bias, seed=seed)[0]
    return PlannedLinear.apply(x, weight, bias, plan, dgrad, seed)


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> None:
    check_recipe(recipe)
    check_operands(x, weight, bias)
    remedy = ", or leave the layer in torch.nn"
    refuse_tangents("blockscale.nn.linear has", x, weight, bias, remedy=remedy)
    if isinstance(weight, ScaledTensor):
        raise TypeError(
            "weight: is a ScaledTensor; call blockscale.nn.quantized_linear (of a model: "
            "blockscale.quantize_), or pass the high-precision weight"
        )
    check_dtype("x", x)
    check_dtype("weight", weight)


def _check_seed(seed: object, recipe: Recipe) -> None:
    if not isinstance(seed, LayerSeed | None):
        raise TypeError(
            f"seed: got {type(seed).__name__}; expected blockscale.nn.LayerSeed(value, step)"
        )
    if seed is None and recipe.is_random:
        raise ValueError(
            "seed: got None, and the recipe rounds stochastically; pass a blockscale.nn.LayerSeed("
            "value, step), or give the recipe to blockscale.convert or blockscale.nn.Linear, whose "
            "layers count steps (those whose .recipe was set by hand do not)"
        )


def check_dtype(name: str, tensor: Tensor) -> None:
    """TypeError unless a layer can quantize it."""
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"{name}: got {tensor.dtype}; expected one of {', '.join(map(str, DTYPES))}: cast "
            "the model and its inputs, or leave the layer in torch.nn (filter_fn)"
        )


def check_whole(name: str, tensor: object) -> None:
    """TypeError unless it is a tensor that is no shard of another one."""
    check_is_tensor(name, tensor)
    if is_dtensor(tensor):
        raise TypeError(
            f"{name}: is a DTensor, whose shards cannot be quantized one by one in general; share "
            "converted layers by ColwiseParallel and RowwiseParallel of blockscale.distributed in "
            "the place of torch's, use FSDP, or call .full_tensor() or .to_local() first"
        )


def check_operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise unless these are tensors that a layer can multiply and add, in rows."""
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if name != "bias" or tensor is not None:
            check_whole(name, tensor)
    if isinstance(x, ScaledTensor):
        raise TypeError(
            "x: is a ScaledTensor, and a layer quantizes its input itself; pass the high-precision "
            "tensor, or multiply by blockscale.gemm"
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


class Linear(ForgetsWeights, Unscripted, Stepping, torch.nn.Linear):
    """torch.nn.Linear with block-scaled products.

    >>> layer = bs.nn.Linear(512, 256, recipe=bs.Recipe("mxfp8"))
    >>> y = layer(torch.randn(8, 512))

    Parameters, their names and the state_dict are those of torch.nn.Linear: the weight stays in
    high precision. ``recipe`` is a :class:`Recipe`; the other arguments are torch.nn.Linear's.
    Raises TypeError for a recipe that is none, ValueError for one that quantizes weights only.
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
        recipe = Recipe() if recipe is None else recipe
        check_training_recipe(recipe)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = recipe
        self.set_rounding(recipe, drawn_number() if recipe.is_random else 0)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, recipe=self.recipe, seed=self.next_seed())

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        before = self._parameters.get("weight")  # none where it is computed
        super()._load_from_state_dict(*args, **kwargs)
        gathered = getattr(getattr(before, "_local_tensor", before), "in_place_of", None)
        if gathered is not None and self.weight is not before:  # assign=True
            self.weight = gathered(self.weight)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}"
