"""Linear layers that hold their weight quantized, for inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..gemm import gemm
from ..ops.backends import fall_back
from ..ops.operand_layout import operand_layout
from ..tensor import ScaledTensor
from ..watching import has_tangent, is_transformed
from .forms import quantize_forms
from .linear import check_dtype, check_operands
from .output_dtype import output_dtype
from .passes import unflatten_rows
from .recipe import Recipe, check_inference_recipe
from .unscripted import Unscripted

__all__ = ["QuantizedConv1D", "QuantizedLinear", "quantized_linear", "transposed_weight"]


def quantized_linear(
    x: Tensor, weight: ScaledTensor, bias: Tensor | None = None, *, recipe: Recipe
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

    Returns (..., N) in the dtype of ``x``, or that of torch.autocast where it is on. The gradient
    of ``x`` is ``grad @ weight.dequantize()``, summed in fp32; the weight has none.
    Raises ValueError or TypeError, with the remedy, where these do not belong together, and
    NotImplementedError under torch.func, torch.jit.trace and for forward-mode differentiation, and
    in torch.export where activations are quantized and ``weight`` is a parameter still.
    """
    check_operands(x, weight, bias)
    check_inference_recipe(recipe)
    if not isinstance(weight, ScaledTensor):
        raise TypeError(
            f"weight: got a plain {weight.dtype} tensor; expected a ScaledTensor: call "
            "blockscale.quantize, or blockscale.nn.linear for a high-precision weight"
        )
    check_dtype("x", x)
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "weight: is quantized and has no gradient; call weight.requires_grad_(False), or train "
            "a model with high-precision weights by blockscale.convert"
        )
    if is_transformed() or has_tangent(x, bias):
        raise NotImplementedError(
            "torch.func and forward-mode differentiation do not reach layers that hold quantized "
            "weights; transform the model with high-precision weights (blockscale.convert)"
        )
    _check_export(weight, recipe)
    out_dtype = output_dtype(x)
    if out_dtype != x.dtype and recipe.weight_only:
        x = x.to(out_dtype)  # others are quantized from what they are
    return _QuantizedLinear.apply(x, weight, bias, recipe, out_dtype)


def _check_export(weight: ScaledTensor, recipe: Recipe) -> None:
    """torch.export watches the attributes of all tensors of the class that parameters have, and
    knows none of those that are made on the way."""
    # the flag itself: torch.compile of torch 2.11 takes is_exporting() to be True
    if recipe.weight_only or not torch.compiler._is_exporting_flag:
        return
    if isinstance(weight, torch.nn.Parameter) or torch.compiler.is_dynamo_compiling():
        raise NotImplementedError(
            "torch.export cannot follow quantized activations beside weights that are parameters; "
            "call torch._functorch._aot_autograd.subclass_parametrization."
            "unwrap_tensor_subclass_parameters(copy.deepcopy(model)) first, and export what it "
            "returns with strict=False"
        )


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: ScaledTensor,
        bias: Tensor | None,
        recipe: Recipe,
        out_dtype: torch.dtype,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if rows.shape[0]:
            y = _multiply(rows, weight, bias, recipe, out_dtype)
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
        return grad_x, None, grad_bias, None, None


def _multiply(
    rows: Tensor,
    weight: ScaledTensor,
    bias: Tensor | None,
    recipe: Recipe,
    out_dtype: torch.dtype,
) -> Tensor:
    if not recipe.weight_only:
        forms = quantize_forms(rows, recipe.operand("activations"), rows=True)
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


class _HoldsQuantized(Unscripted, torch.nn.Module):
    """What layers with a quantized weight do when they are moved and loaded."""

    recipe: Recipe
    weight: Any  # a ScaledTensor that is a parameter
    bias: Any

    def extra_repr(self) -> str:
        weight = f"weight={self.weight.format_name}"
        return f"{super().extra_repr()}, {weight}, recipe={self.recipe}".removeprefix(", ")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._place()
        return self

    def _place(self) -> None:
        """Scales in the layout that the kernels of the weight's device read."""
        layout = operand_layout(self.weight.format_name, self.weight.device).layout
        if self.weight.layout_name != layout:
            placed = torch.nn.Parameter(self.weight.detach().to_layout(layout), requires_grad=False)
            torch.utils.swap_tensors(self.weight, placed)  # other layers may hold it, too

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        name = f"{prefix}weight"
        if name in state_dict:
            given, held = state_dict[name], self.weight
            why = _mismatch(given, held)
            if why:
                error_msgs.append(f"{name}: {why}")
                return
            given = given.to_layout(held.layout_name)
            if not local_metadata.get("assign_to_params_buffers", False):
                given = given._with(dtype=held.dtype)  # only what dequantize() returns
            state_dict = {**state_dict, name: given}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._place()


#: `blockscale quantize` makes blocks along the last dimension, and not of every weight.
_ANEW = (
    "load the high-precision weights, call blockscale.quantize_(model, recipe), and "
    "blockscale.checkpoint.save_file writes a file that this layer reads"
)


def _mismatch(given: Any, held: ScaledTensor) -> str:
    """Why a weight from a state_dict cannot take the place of the one held; "" if it can."""
    if not isinstance(given, ScaledTensor):
        kind = f"a plain {given.dtype} tensor" if isinstance(given, Tensor) else type(given)
        return (
            f"got {kind}, the layer holds its weight in {held.format_name}; load high-precision "
            "weights before blockscale.quantize_(model, recipe), and read quantized files by "
            "blockscale.checkpoint.load_file"
        )
    got, have = (f"{q.format_name} {tuple(q.shape)} along {q.axis}" for q in (given, held))
    if given.shape == held.shape and given.axis != held.axis and given.offsets is None:
        return (
            f"got {got}, the layer holds {have}: the file's blocks run along the other dimension, "
            f"which no recipe changes; {_ANEW}"
        )
    if got != have or given.offsets is not None:
        return (
            f"got {got}{' in groups' * (given.offsets is not None)}, the layer holds {have}; "
            "choose the recipe that the file was quantized with, or quantize anew from high "
            "precision"
        )
    return ""


class QuantizedLinear(_HoldsQuantized, torch.nn.Linear):
    """torch.nn.Linear that holds its weight quantized; made by :func:`blockscale.quantize_`.

    >>> recipe = bs.Recipe("nvfp4", activations="bfloat16")
    >>> layer = bs.nn.QuantizedLinear(bs.quantize(torch.randn(256, 512), "nvfp4"), recipe=recipe)

    Args:
        weight: (N, K), blocked along axis -1.
        bias: (N,) or None.
        recipe: its format of weights is that of ``weight``.

    ``weight`` is a parameter without gradient, a :class:`~blockscale.ScaledTensor`: state_dict,
    load_state_dict, ``.to(device)``, copies and pickles take it as a whole. A change of dtype
    changes no byte of it. Raises TypeError or ValueError where the arguments do not fit.
    """

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
        self._place()

    def forward(self, x: Tensor) -> Tensor:
        return quantized_linear(x, self.weight, self.bias, recipe=self.recipe)


class QuantizedConv1D(_HoldsQuantized):
    """The same of transformers' Conv1D: its weight is (in, out), blocked along axis -2."""

    def forward(self, x: Tensor) -> Tensor:
        return quantized_linear(x, transposed_weight(self.weight), self.bias, recipe=self.recipe)


def own_global_scale(weight: Any) -> None:
    """Copy it: what is loaded into a layer must not reach others that were quantized with it."""
    if weight.global_scale is not None:
        weight.global_scale = weight.global_scale.clone()


def check_held(weight: Any, recipe: Recipe, axis: int) -> str:
    """Why a layer cannot multiply by ``weight`` as ``recipe`` says; "" if it can."""
    wanted = recipe.format_of("weights").name
    if not isinstance(weight, ScaledTensor):
        return f"got {type(weight).__name__}; expected a blockscale.ScaledTensor"
    if weight.dim() != 2 or weight.axis != axis or weight.offsets is not None:
        return (
            f"got {weight}; expected one matrix that is blocked along axis {axis}, without groups: "
            f"{_ANEW}"
        )
    if weight.format_name != wanted:
        return (
            f"is in {weight.format_name}, the recipe wants {wanted}; pass "
            f"Recipe(..., weights={weight.format_name!r}), and filter_fn where formats are mixed"
        )
    return ""
