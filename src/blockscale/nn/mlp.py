"""A feed-forward layer with SwiGLU, as one: what SwiGLU makes exists quantized only."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops, reference
from ..fused import swiglu_backward_quantize, swiglu_quantize
from ..watching import is_dtensor, is_transformed, refuse_tangents
from . import passes
from .double_backward import refuse_double_backward
from .forms import Forms, quantize_forms
from .linear import Linear, check_linear
from .main_grad import apply, leaf_of, open_main_grad
from .output_dtype import output_dtype
from .parts import make_forms, multiplies_quantized, served, serves_quantized
from .recipe import Recipe
from .reuse import hint_at_reuse, quantized_weight
from .unscripted import Unscripted

__all__ = ["MLP"]


class _How(NamedTuple):
    """Which products of the backward will follow, and how all multiply."""

    gate_up: Recipe
    down: Recipe
    dtype: torch.dtype
    gate_up_dgrad: bool
    gate_up_wgrad: bool
    down_dgrad: bool
    down_wgrad: bool


class _SwiGLUProducts(torch.autograd.Function):
    """Keeps x by columns, the first product, and SwiGLU of it by columns."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        how: _How,
    ) -> Tensor:
        needs = how.gate_up_wgrad, how.gate_up_dgrad
        rows = passes.matrix_of(x)
        h, x_kept, gate_up_scalar = passes.fprop(
            rows, gate_up, gate_up_bias, how.gate_up, how.dtype, *needs
        )
        made = make_forms(
            partial(swiglu_quantize, h),
            how.down,
            "activations",
            h.device,
            rows=True,
            columns=how.down_wgrad,
        )
        assert made.rows is not None
        quantize_weight = partial(quantized_weight, dgrad=how.down_dgrad)
        y, down_scalar = passes.multiply(
            made.rows, down, down_bias, how.down, how.dtype, quantize_weight
        )
        ctx.save_for_backward(
            x_kept if how.gate_up_wgrad else None,
            *((gate_up, gate_up_scalar) if how.gate_up_dgrad else (None, None)),
            *((h, down, down_scalar) if how.down_dgrad else (None, None, None)),
            made.columns,
        )
        ctx.how, ctx.shape, ctx.x_dtype = how, x.shape, x.dtype
        weights = {"gate_up": (gate_up, how.gate_up_wgrad), "down": (down, how.down_wgrad)}
        ctx.leaves = {name: leaf_of(name, w) for name, (w, trains) in weights.items() if trains}
        ctx.dtypes = {
            name: None if each is None else each.dtype
            for name, each in (
                ("gate_up", gate_up),
                ("gate_up_bias", gate_up_bias),
                ("down", down),
                ("down_bias", down_bias),
            )
        }
        return passes.unflatten_rows(y, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        how, dtypes, needs = ctx.how, ctx.dtypes, ctx.needs_input_grad
        main_grads = {name: open_main_grad(name, leaf) for name, leaf in ctx.leaves.items()}
        x, gate_up, gate_up_scalar, h, down, down_scalar, made = ctx.saved_tensors
        of_x = of_gate_up = of_gate_up_bias = of_down = of_down_bias = None
        with torch.no_grad():
            g = passes.matrix_of(grad)
            gradients = how.down.operand("gradients")
            forms = quantize_forms(g, gradients, rows=how.down_dgrad, columns=how.down_wgrad)
            if how.down_wgrad:
                assert forms.columns is not None
                of_down = passes.weight_gradient(
                    forms.columns, made, dtypes["down"], main_grads["down"]
                )
            if needs[4]:
                of_down_bias = g.sum(0, dtype=torch.float32).to(dtypes["down_bias"])
            if how.down_dgrad:
                given = down, down_scalar, how.down, how.dtype, quantized_weight
                assert forms.rows is not None
                of_made = passes.data_gradient(forms.rows, *given)
                del forms
                forms, of_gate_up_bias = _gradient_of_h(of_made, h, how, needs[2])
                if of_gate_up_bias is not None:
                    of_gate_up_bias = of_gate_up_bias.to(dtypes["gate_up_bias"])
                del of_made, h
            if how.gate_up_dgrad:
                given = gate_up, gate_up_scalar, how.gate_up, ctx.x_dtype, quantized_weight
                assert forms.rows is not None
                of_x = passes.data_gradient(forms.rows, *given).reshape(ctx.shape)
            if how.gate_up_wgrad:
                assert forms.columns is not None
                of_gate_up = passes.weight_gradient(
                    forms.columns, x, dtypes["gate_up"], main_grads["gate_up"]
                )
        found = of_x, of_gate_up, of_gate_up_bias, of_down, of_down_bias
        return *refuse_double_backward(found), None


def _gradient_of_h(grad: Tensor, h: Tensor, how: _How, bias: bool) -> tuple[Forms, Tensor | None]:
    """As the first product's backward reads it, and the sum of its rows, for a ``bias``."""
    make, total = partial(swiglu_backward_quantize, grad, h), None
    asked: Any = {"rows": how.gate_up_dgrad, "columns": how.gate_up_wgrad}
    if bias:  # which sums what is not quantized
        values = ops.swiglu_backward(grad, h)
        total = values.sum(0, dtype=torch.float32)
        return quantize_forms(values, how.gate_up.operand("gradients"), **asked), total
    return make_forms(make, how.gate_up, "gradients", h.device, **asked), total


class _SwiGLU(torch.autograd.Function):
    """Alone, to the bit of the quantizers that have it in front."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h: Tensor) -> Tensor:
        return reference.swiglu(h) if is_transformed() else ops.swiglu(h)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (h,) = ctx.saved_tensors
        with torch.no_grad():
            made = reference.swiglu_backward if is_transformed() else ops.swiglu_backward
            found = made(grad.contiguous(), h)
        return refuse_double_backward((found,), grad, h)


class MLP(Unscripted, torch.nn.Module):
    """``down(silu(gate) * up)``, gate and up from one product: the feed-forward layer of a Llama.

    >>> mlp = bs.nn.MLP(512, 1024, recipe=bs.Recipe("mxfp8"))
    >>> y = mlp(torch.randn(8, 512))

    ``gate_up`` is a :class:`Linear` to twice ``ffn_hidden_size`` features, those of the gate first,
    and ``down`` one back to ``hidden_size``. The result and all gradients have the bits of these,
    with SwiGLU of :func:`blockscale.swiglu_quantize` between. What SwiGLU makes is quantized along
    rows for fprop and, in training, along columns for wgrad as it is made; so is, in the backward,
    the gradient of what ``gate_up`` gave (but for a bias, which sums it). Until the backward, x by
    columns, what ``gate_up`` gave and SwiGLU of it by columns are kept.

    The state_dict has ``gate_up.weight`` (2 ffn_hidden_size, hidden_size), which is
    ``torch.cat([gate.weight, up.weight])``, and ``down.weight``. Of Transformer Engine they are
    ``fc1_weight`` and ``fc2_weight`` of a LayerNormMLP with ``activation="swiglu"``.

    The parts run one after the other, to the same bits, where one has hooks or was made something
    else (``convert(model, None)``, tensor parallelism, shards of its own), where a recipe has
    products in high precision or, by :func:`blockscale.quantize_`, leaves activations as they are,
    and under torch.func. :func:`blockscale.quantize_` changes both layers; the operand of ``down``
    is then quantized as it is made under ``torch.no_grad()``. Kernels of a GPU have SwiGLU's
    backward where ``ffn_hidden_size`` is a multiple of 128.

    Args:
        hidden_size: of x and the result.
        ffn_hidden_size: of what is between.
        bias: whether both layers have one.
        recipe: of both; :func:`blockscale.convert` changes them.

    Raises TypeError or ValueError as :class:`Linear`.

    Source: Shazeer, "GLU variants improve transformer", arXiv 2002.05202.
    """

    gate_up: Any
    down: Any

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__()
        self.ffn_hidden_size = ffn_hidden_size
        how: Any = {"bias": bias, "device": device, "dtype": dtype, "recipe": recipe}
        self.gate_up = Linear(hidden_size, 2 * ffn_hidden_size, **how)
        self.down = Linear(ffn_hidden_size, hidden_size, **how)

    def forward(self, x: Tensor) -> Tensor:
        gate_up, down = self.gate_up, self.down
        if not multiplies_quantized(x, gate_up, down):
            h = gate_up(x)
            self._check_halves(h)
            if serves_quantized(h, down):
                made = partial(swiglu_quantize, passes.matrix_of(h))
                return served(made, down, h, output_dtype(h))
            y: Tensor = down(_SwiGLU.apply(h))
            return y
        check_linear(x, gate_up.weight, gate_up.bias, gate_up.recipe)
        _check_down(gate_up.weight, down.weight)
        trains = torch.is_grad_enabled()
        first = x, gate_up.weight, gate_up.bias
        needs = [trains and each is not None and each.requires_grad for each in first]
        wgrad = trains and down.weight.requires_grad
        recipes = gate_up.recipe, down.recipe
        how = _How(*recipes, output_dtype(x), needs[0], needs[1], any(needs), wgrad)
        weights = gate_up.weight, down.weight
        for each, multiplied in zip(weights, (needs[:2], (how.down_dgrad, wgrad)), strict=True):
            if not any(multiplied):
                hint_at_reuse(each)
        y = apply(_SwiGLUProducts, weights, *first, down.weight, down.bias, how)
        return y

    def _check_halves(self, h: Tensor) -> None:
        """Raise unless ``h`` is all of gate and up."""
        refuse_tangents("SwiGLU of blockscale has", h)
        whole = 2 * self.ffn_hidden_size
        if is_dtensor(h) or h.shape[-1] != whole:
            raise ValueError(
                f"gate_up: gave {h.shape[-1]} features of {whole}: a rank has rows of the gate or "
                "of up, whose products need both; share gate and up as linear layers of their own"
            )


def _check_down(gate_up: Tensor, down: Tensor) -> None:
    if down.dim() != 2 or 2 * down.shape[1] != gate_up.shape[0]:
        raise ValueError(
            f"down.weight: has shape {tuple(down.shape)}; gate_up.weight {tuple(gate_up.shape)} "
            f"makes {gate_up.shape[0] // 2} features of SwiGLU, which it has to read"
        )
