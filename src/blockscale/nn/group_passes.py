"""The three products of weights with rows in groups, quantized as a recipe says.

Weights are (groups, N, K), or, ``transposed``, (groups, K, N): parameters as they are, since a view
of one would not be known to ``reuse_weights``. ``recipe`` None: nothing is quantized, and products
are those of the operands' type.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..gemm import grouped_gemm
from ..ops.backends import on_cpu
from ..ops.operand_layout import operand_layout
from ..quantize import quantize, quantize_both
from ..tensor import ScaledTensor
from .forms import Forms
from .recipe import Recipe
from .reuse import quantized_weight

__all__ = [
    "dgrad",
    "fprop",
    "is_quantized",
    "of_rows",
    "quantize_groups",
    "sum_groups",
    "wgrad",
]


def is_quantized(recipe: Recipe | None, product: str) -> bool:
    return recipe is not None and product not in recipe.high_precision


def quantize_groups(
    x: Tensor,
    recipe: Recipe | None,
    role: str,
    offsets: Tensor,
    *,
    rows: str = "",
    columns: str = "",
) -> Forms:
    """The forms of rows (R, K) of ``role`` that products want which are quantized: ``rows`` and
    ``columns`` name one each, or none. Blocks along columns begin anew in each group."""
    wanted = [bool(name) and is_quantized(recipe, name) for name in (rows, columns)]
    if not any(wanted):
        return Forms()
    assert recipe is not None
    name = recipe.format_of(role).name
    how: Any = {
        "scale_rounding": recipe.scale_rounding,
        "layout": operand_layout(name, x.device).layout,
        "pad": True,
        "offsets": offsets,
        "k_major": True,
    }
    if all(wanted):
        return Forms(*quantize_both(x, name, **how))
    if wanted[0]:
        return Forms(rows=quantize(x, name, -1, **{**how, "k_major": False}))
    return Forms(columns=quantize(x, name, -2, **how))


def fprop(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    recipe: Recipe | None,
    dtype: torch.dtype,
    transposed: bool = False,
) -> Tensor:
    """``x[start:end] @ weight[i].T`` of each group; ``x`` is quantized by rows, or plain."""
    return _product(x, weight, offsets, recipe, dtype, transposed)


def dgrad(
    g: Tensor,
    weight: Tensor,
    offsets: Tensor,
    recipe: Recipe | None,
    dtype: torch.dtype,
    transposed: bool = False,
) -> Tensor:
    """``g[start:end] @ weight[i]`` of each group; ``g`` is quantized by rows, or plain."""
    return _product(g, weight, offsets, recipe, dtype, not transposed)


def wgrad(
    g: Tensor, x: Tensor, offsets: Tensor, dtype: torch.dtype, transposed: bool = False
) -> Tensor:
    """``g[start:end].T @ x[start:end]`` of each group: like the weight. Both are quantized by
    columns, or plain."""
    g, x = (x, g) if transposed else (g, x)
    if isinstance(g, ScaledTensor) and isinstance(x, ScaledTensor):
        return grouped_gemm(g.mT, x, offsets, dtype)
    both = torch.promote_types(g.dtype, x.dtype)
    wide = torch.promote_types(both, torch.float32) if on_cpu(x) else both
    out = g.new_zeros(len(offsets), g.shape[1], x.shape[1], dtype=dtype)
    for i, (start, end) in enumerate(_bounds(offsets)):
        if start < end:
            with torch.autocast(x.device.type, enabled=False):
                out[i] = g[start:end].to(wide).mT @ x[start:end].to(wide)
    return out


def of_rows(values: Tensor, rows: int, offsets: Tensor) -> Tensor:
    """Of each row the group's of ``values`` (groups, N); zeros for rows of no group."""
    row = torch.arange(rows, device=offsets.device, dtype=torch.int32)
    group = torch.searchsorted(offsets, row, right=True)
    return torch.cat((values, torch.zeros_like(values[:1])))[group]


def sum_groups(x: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """Of each group's rows (groups, N), added up in fp32, or in float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    lengths = offsets.long().diff(prepend=offsets.new_zeros(1).long())
    ends = torch.cat((lengths, (len(x) - offsets[-1:]).long()))  # and those of no group
    total = torch.segment_reduce(wide, "sum", lengths=ends, axis=0, initial=0.0, unsafe=True)
    return total[:-1].to(dtype)


def _product(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    recipe: Recipe | None,
    dtype: torch.dtype,
    upright: bool,
) -> Tensor:
    """``x[start:end] @ weight[i]`` of each group, or, unless weights are ``upright``, by their
    transposes."""
    if not isinstance(x, ScaledTensor):
        return _plain(x, weight if upright else weight.mT, offsets, dtype)
    assert recipe is not None
    how = recipe.format_of("weights").name, recipe.scale_rounding
    forms = quantized_weight(weight, *how, rows=not upright, columns=upright)
    w = forms.columns if upright else forms.rows
    assert w is not None
    return grouped_gemm(x, w if upright else w.mT, offsets, dtype)


def _plain(x: Tensor, weight: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """``x[start:end] @ weight[i]`` of each group. A CPU may take 50 times as long for bf16 as for
    fp32, in which its products are exact, too."""
    wide = torch.promote_types(x.dtype, torch.float32) if on_cpu(x) else x.dtype
    out = x.new_zeros(len(x), weight.shape[2], dtype=dtype)
    for i, (start, end) in enumerate(_bounds(offsets)):
        if start < end:
            with torch.autocast(x.device.type, enabled=False):
                out[start:end] = x[start:end].to(wide) @ weight[i].to(x.dtype).to(wide)
    return out


def _bounds(offsets: Tensor) -> list[tuple[int, int]]:
    """Of each group; waits for the device."""
    return list(pairwise([0, *offsets.tolist()]))
