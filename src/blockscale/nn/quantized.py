"""Linear layers that hold their weight quantized, for inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..gemm import gemm
from ..ops.backends import fall_back
from ..tensor import ScaledTensor
from .forms import quantize_forms
from .holds import HoldsQuantized, check_called, check_held, own_global_scale
from .linear import check_dtype, check_operands
from .output_dtype import output_dtype
from .passes import unflatten_rows
from .recipe import Recipe, check_inference_recipe

__all__ = [
    "QuantizedConv1D",
    "QuantizedLinear",
    "has_input_scale",
    "quantized_linear",
    "transposed_weight",
]


def quantized_linear(
    x: Tensor,
    weight: ScaledTensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe,
    input_scale: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T + bias`` by a weight that is quantized already.

    >>> x, q = torch.randn(8, 512), bs.quantize(torch.randn(256, 512), "nvfp4")
    >>> y = bs.nn.quantized_linear(x, q, recipe=bs.Recipe("nvfp4", activations="bfloat16"))

    Args:
        x: (..., K), float32, bfloat16 or float16. It is quantized as ``recipe`` says. Where that
            leaves activations as they are, its products with the weight's exact values are summed
            in fp32; kernels do that for bfloat16.
        weight: (N, K), blocked along axis -1, in the format that ``recipe`` names for weights.
        bias: (N,) or None.
        input_scale: the global scale of activations, an fp32 number, where their format has one:
            what a row gives does not depend on those beside it then. None: that of all of ``x``.

    Returns (..., N) in the dtype of ``x``, or that of torch.autocast where it is on. The gradient
    of ``x`` is ``grad @ weight.dequantize()``, summed in fp32; the weight has none.
    Raises ValueError or TypeError, with the remedy, where these do not belong together, and
    NotImplementedError under torch.func, torch.jit.trace and for forward-mode differentiation, and
    in torch.export where activations are quantized and ``weight`` is a parameter still.
    """
    check_operands(x, weight, bias)
    check_inference_recipe(recipe)
    check_dtype("x", x)
    check_called({"weight": weight}, recipe, (x, bias), "blockscale.nn.linear")
    if input_scale is not None and not has_input_scale(recipe):
        raise ValueError(f"input_scale: activations of {recipe} have no global scale; leave it out")
    out_dtype = output_dtype(x)
    if out_dtype != x.dtype and recipe.weight_only:
        x = x.to(out_dtype)  # others are quantized from what they are
    return _QuantizedLinear.apply(x, weight, bias, recipe, out_dtype, input_scale)


def has_input_scale(recipe: Recipe) -> bool:
    """Whether activations have a global scale."""
    return not recipe.weight_only and recipe.format_of("activations").has_global_scale


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: ScaledTensor,
        bias: Tensor | None,
        recipe: Recipe,
        out_dtype: torch.dtype,
        input_scale: Tensor | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if rows.shape[0]:
            y = _multiply(rows, weight, bias, recipe, out_dtype, input_scale)
        else:
            y = rows.new_empty(0, weight.shape[0], dtype=out_dtype)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(weight.detach())  # else the layer could not be moved meanwhile
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return unflatten_rows(y, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        g = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            (weight,) = ctx.saved_tensors
            values = weight.dequantize(torch.float32)
            grad_x = reference.gemm(g, values, out_dtype=ctx.x_dtype).reshape(ctx.x_shape)
        if ctx.needs_input_grad[2]:
            grad_bias = g.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_x, None, grad_bias, None, None, None


def _multiply(
    rows: Tensor,
    weight: ScaledTensor,
    bias: Tensor | None,
    recipe: Recipe,
    out_dtype: torch.dtype,
    input_scale: Tensor | None,
) -> Tensor:
    if not recipe.weight_only:
        operand = recipe.operand("activations")
        forms = quantize_forms(rows, operand, rows=True, global_scale=input_scale)
        assert forms.rows is not None
        return gemm(forms.rows, transposed_weight(weight), out_dtype, bias=bias)
    if rows.dtype == torch.bfloat16:
        return gemm(rows, transposed_weight(weight), out_dtype, bias=bias)
    if not torch.compiler.is_compiling():
        why = f"x is {rows.dtype}; kernels multiply bfloat16 by quantized weights"
        fall_back("gemm", rows, "auto", why)
    values = weight.dequantize(torch.float32)
    product = reference.gemm(rows, values.mT, out_dtype=out_dtype, bias=bias)
    # torch 2.11 compiles what an autograd.Function gives as zeros for its backward, unless it is
    # made by an operation outside of reference.gemm's autocast
    return product.clone() if torch.compiler.is_compiling() else product


def transposed_weight(weight: ScaledTensor) -> ScaledTensor:
    """``weight.mT``; compilers would guard that attribute of a parameter, made anew each time."""
    held = isinstance(weight, torch.nn.Parameter) and torch.compiler.is_compiling()
    if held or torch.compiler.is_dynamo_compiling():
        return weight.transpose(-2, -1)  # type: ignore[return-value]
    return weight.mT


class QuantizedLinear(HoldsQuantized, torch.nn.Linear):
    """torch.nn.Linear that holds its weight quantized; made by :func:`blockscale.quantize_`.

    >>> recipe = bs.Recipe("nvfp4", activations="bfloat16")
    >>> layer = bs.nn.QuantizedLinear(bs.quantize(torch.randn(256, 512), "nvfp4"), recipe=recipe)

    Args:
        weight: (N, K), blocked along axis -1.
        bias: (N,) or None.
        recipe: its format of weights is that of ``weight``.

    ``weight`` is a parameter without gradient, a :class:`~blockscale.ScaledTensor`: state_dict,
    load_state_dict, ``.to(device)``, copies and pickles take it as a whole. A change of dtype
    changes no byte of it. ``input_scale`` is a buffer, None unless a folder that was calibrated had
    one: the global scale of NVFP4 activations. Raises TypeError or ValueError where the arguments
    do not fit.
    """

    weight: Any  # a ScaledTensor that is a parameter
    bias: Any
    input_scale: Tensor | None

    def __init__(self, weight: ScaledTensor, bias: Tensor | None = None, *, recipe: Recipe) -> None:
        check_inference_recipe(recipe)
        why = check_held(weight, recipe, -1)
        if why:
            raise ValueError(f"weight: {why}")
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        own_global_scale(self.weight)
        if bias is not None and not isinstance(bias, torch.nn.Parameter):
            bias = torch.nn.Parameter(bias)
        self.register_parameter("bias", bias)
        self.recipe = recipe
        self._begin_holding()

    def _begin_holding(self) -> None:
        if "input_scale" not in self._buffers:
            self.register_buffer("input_scale", None)
        super()._begin_holding()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buffers.setdefault("input_scale", None)  # of files that are older

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        """A folder's ``input_scale``, too, where activations are quantized with one."""
        state_dict, self.input_scale = {**state_dict}, None
        scale = state_dict.pop(f"{prefix}input_scale", None)
        super()._load_from_state_dict(state_dict, prefix, *others)
        if scale is not None and has_input_scale(self.recipe):
            scale = scale.detach().to(self.weight.device, torch.float32)
            self.input_scale = scale.reshape(()).clone()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.input_scale
        return quantized_linear(x, self.weight, self.bias, recipe=self.recipe, input_scale=scale)


class QuantizedConv1D(HoldsQuantized):
    """The same of transformers' Conv1D: its weight is (in, out), blocked along axis -2."""

    weight: Any  # a ScaledTensor that is a parameter
    bias: Any

    @staticmethod
    def held(module: Any) -> Mapping[str, int]:
        return {"weight": -2}

    def forward(self, x: Tensor) -> Tensor:
        return quantized_linear(x, transposed_weight(self.weight), self.bias, recipe=self.recipe)
