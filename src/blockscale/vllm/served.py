"""A quantized weight as a module, and the op that multiplies by it.

The op takes tensors that torch knows and names: vLLM's compiler records it as one node, alike for
layers of one shape, and its caches hold nothing of ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import get_format
from ..gemm import gemm
from ..memory import as_bytes
from ..nn.forms import quantize_forms
from ..nn.layer_ops import recipe_of
from ..nn.quantized import quantized_linear
from ..nn.recipe import Recipe
from ..ops.gemm_kernels import products_on
from ..ops.operand_layout import operand_layout
from ..ops.operation import operation
from ..tensor import ScaledTensor
from .weights import Weight

__all__ = ["ServedLinear", "check_device", "multiply"]


def check_device(device: torch.device, recipe: Recipe, layer: str) -> None:
    """ValueError where a GPU has no kernel for a layer's products."""
    if device.type == "cpu":
        return
    weights = recipe.format_of("weights").name
    activations = None if recipe.weight_only else recipe.format_of("activations").name
    found = products_on(device)
    if isinstance(found, str):
        why = found
    elif (activations, weights) not in found.pairs:
        why = f"no kernel multiplies {activations or 'bf16'} by {weights} on {found.gpu}"
    else:
        return
    is_cuda = device.type == "cuda" and torch.cuda.is_available()
    chip = torch.cuda.get_device_capability(device) if is_cuda else None
    of = f" of compute capability {chip[0]}.{chip[1]}" if chip else ""
    raise ValueError(
        f"{layer}: {device}{of} does not run blockscale's layers: {why}. Hopper (9.0) does; here "
        "serve the model without quantization='blockscale', by vLLM's own kernels"
    )


class ServedLinear(torch.nn.Module):
    """A weight (N, K) that stays as it is, and ``x @ weight.T + bias``.

    >>> layer = ServedLinear(Weight(bs.quantize(torch.randn(256, 512), "mxfp8"), None), recipe)

    Its scales lie as the device's kernels read them. NVFP4 activations are quantized with the
    checkpoint's global scale, others as they come.
    """

    def __init__(self, weight: Weight, recipe: Recipe) -> None:
        super().__init__()
        q = weight.q.to_layout(operand_layout(weight.q.format_name, weight.q.device).layout)
        self.format_name, self.layout_name, self.shape = q.format_name, q.layout_name, list(q.shape)
        self.recipe = recipe
        dynamic = recipe.weight_only or not recipe.format_of("activations").has_global_scale
        self.codes = torch.nn.Parameter(as_bytes(q.qdata), requires_grad=False)
        self.scales = torch.nn.Parameter(q.qscale, requires_grad=False)
        self.global_scale = _held(q.global_scale)
        self.input_scale = _held(None if dynamic else weight.input_scale)

    @property
    def weight(self) -> ScaledTensor:
        """The weight, of the same memory."""
        stored = self.codes, self.scales, self.global_scale
        return _weight(*stored, self.format_name, self.layout_name, self.shape)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        stored = self.codes, self.scales, self.global_scale, self.input_scale
        how = self.format_name, self.layout_name, self.shape, self.recipe.text
        return served_linear(x, *stored, bias, *how)

    def extra_repr(self) -> str:
        return f"{self.format_name}, shape={tuple(self.shape)}, recipe={self.recipe}"


def _held(x: Tensor | None) -> torch.nn.Parameter | None:
    return None if x is None else torch.nn.Parameter(x.detach(), requires_grad=False)


def _weight(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    format: str,
    layout: str,
    shape: list[int],
) -> ScaledTensor:
    return ScaledTensor(
        codes.view(get_format(format).element.dtype),
        scales,
        format=format,
        shape=shape,
        layout=layout,
        global_scale=global_scale,
    )


def _fake(x: Tensor, shape: list[int]) -> Tensor:
    return x.new_empty([*x.shape[:-1], shape[0]])


@operation(_fake)
def served_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    input_scale: Tensor | None,
    bias: Tensor | None,
    format: str,
    layout: str,
    shape: list[int],
    recipe: str,
) -> Tensor:
    """``x @ weight.T + bias`` by a weight as its parts, quantized as the text of a recipe says."""
    weight = _weight(codes, scales, global_scale, format, layout, shape)
    return multiply(x, weight, input_scale, bias, recipe_of(recipe))


def multiply(
    x: Tensor, weight: ScaledTensor, input_scale: Tensor | None, bias: Tensor | None, recipe: Recipe
) -> Tensor:
    """:func:`blockscale.nn.quantized_linear`, of activations whose global scale may be known."""
    if input_scale is None:
        return quantized_linear(x, weight, bias, recipe=recipe)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if not rows.shape[0]:
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    operand = recipe.operand("activations")
    q = quantize_forms(rows, operand, rows=True, global_scale=input_scale).rows
    assert q is not None
    return gemm(q, weight.mT, x.dtype, bias=bias).view(*x.shape[:-1], weight.shape[0])
