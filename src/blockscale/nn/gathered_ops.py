"""A layer's passes with a weight that ranks have quantized and gathered, as the ops that compilers
see.

Such a weight has no values that a graph could hold: which form of it lies in memory, and which has
to be gathered, changes between the forward and the backward. A graph holds its number, and each op
asks the weight of that number for the form that it reads, when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..ops.operation import operation
from ..tensor import ScaledTensor
from . import passes
from .forms import Forms
from .layer_ops import activation_of, recipe_of
from .layer_plan import Metadata
from .operand import Operand
from .seeds import seed_of_numbers

__all__ = ["QuantizedElsewhere", "gathered_backward", "gathered_dgrad", "gathered_fprop", "number"]


class QuantizedElsewhere(Protocol):
    """What may be asked for its forms; a layer quantizes anything else itself."""

    def quantized_forms(self, operand: Operand, *, rows: bool, columns: bool) -> Forms | None: ...


_numbers = count()  # none is given twice
_weights: WeakValueDictionary[int, QuantizedElsewhere] = WeakValueDictionary()


def number(weight: QuantizedElsewhere) -> Tensor:
    """The number that ops know ``weight`` by, on the CPU."""
    found = next(_numbers)
    _weights[found] = weight
    with torch.inference_mode(False):  # so that backwards may keep it
        return torch.tensor([found])


def _quantizer(handle: Tensor) -> Callable[..., Forms]:
    """What gives the forms of the weight of this number, in place of ``quantize_forms``."""
    return partial(_forms, int(handle))


def _forms(
    handle: int,
    weight: Tensor,
    operand: Operand,
    *,
    rows: bool = False,
    columns: bool = False,
    global_scale: Tensor | None = None,
) -> Forms:
    found = _weights.get(handle)
    if found is None:
        raise RuntimeError(
            "weight: the gathered weight of this compiled code is gone; keep the module until its "
            "backward has run"
        )
    forms = found.quantized_forms(operand, rows=rows, columns=columns)
    if forms is None:
        raise RuntimeError(
            f"weight: {found} was gathered quantized when this code was compiled, and has values "
            "now; compile it anew (torch.compiler.reset)"
        )
    return forms


def _fake_fprop(
    x_data: Tensor, x_shape: list[int], w_shape: list[int], out_dtype: torch.dtype
) -> Tensor:
    return x_data.new_empty([x_shape[0], w_shape[0]], dtype=out_dtype)


@operation(_fake_fprop, tags=(torch.Tag.cudagraph_unsafe,))
def gathered_fprop(
    x_data: Tensor,
    x_scale: Tensor,
    x_global: Tensor | None,
    x_layout: str,
    x_shape: list[int],
    x_dtype: torch.dtype,
    handle: Tensor,
    w_shape: list[int],
    bias: Tensor | None,
    recipe: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """``linear_fprop`` with the weight (N, K) of this number. Its global scale is the weight's own,
    which the backward finds there."""
    metadata = Metadata(recipe_of(recipe), torch.Size(x_shape), (x_dtype, x_dtype, None))
    x = activation_of(metadata, x_layout, (x_data, x_scale, x_global), -1)
    return passes.multiply(x, handle, bias, metadata.recipe, out_dtype, _quantizer(handle))[0]


def _fake_backward(
    grad: Tensor, x_shape: list[int], x_dtype: torch.dtype, w_dtype: torch.dtype, wgrad: bool
) -> list[Tensor]:
    rows, k = x_shape
    made = [grad.new_empty([rows, k], dtype=x_dtype)]
    return made + [grad.new_empty([grad.shape[1], k], dtype=w_dtype)] * wgrad


@operation(_fake_backward, tags=(torch.Tag.cudagraph_unsafe,))
def gathered_backward(
    grad: Tensor,
    x_data: Tensor | None,
    x_scale: Tensor | None,
    x_global: Tensor | None,
    x_layout: str,
    x_shape: list[int],
    x_dtype: torch.dtype,
    handle: Tensor,
    w_dtype: torch.dtype,
    recipe: str,
    wgrad: bool,
    seed: list[int] | None = None,
    step: Tensor | None = None,
) -> list[Tensor]:
    """``linear_backward`` with ``dgrad``, which reads the weight of this number."""
    found = seed_of_numbers(seed, step)
    metadata = Metadata(recipe_of(recipe), torch.Size(x_shape), (x_dtype, w_dtype, None), found)
    x: ScaledTensor | None = None
    if x_data is not None and x_scale is not None:
        x = activation_of(metadata, x_layout, (x_data, x_scale, x_global), -2)
    needs = True, wgrad, False
    made = passes.gradients(needs, metadata, grad, x, handle, None, _quantizer(handle))
    return [each for each in made if each is not None]


def _fake_dgrad(
    g_data: Tensor, g_shape: list[int], w_shape: list[int], out_dtype: torch.dtype
) -> Tensor:
    return g_data.new_empty([g_shape[0], w_shape[1]], dtype=out_dtype)


@operation(_fake_dgrad, tags=(torch.Tag.cudagraph_unsafe,))
def gathered_dgrad(
    g_data: Tensor,
    g_scale: Tensor,
    g_global: Tensor | None,
    g_layout: str,
    g_shape: list[int],
    handle: Tensor,
    w_shape: list[int],
    recipe: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """``g @ weight`` of a gradient (M, N) that was quantized along -1, and the weight (N, K) of
    this number."""
    found = recipe_of(recipe)
    format = found.format_of("gradients")
    given: Any = {"format": format, "shape": g_shape, "dtype": out_dtype, "layout": g_layout}
    g = ScaledTensor(g_data, g_scale, global_scale=g_global, **given)
    return passes.data_gradient(g, handle, None, found, out_dtype, _quantizer(handle))
