"""The three products of weights with rows in groups, quantized as a recipe says.

Weights are (groups, N, K), or, ``transposed``, (groups, K, N): parameters as they are, since a view
of one would not be known to ``reuse_weights``. ``recipe`` None: nothing is quantized, and products
are those of the operands' type.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..gemm import grouped_gemm
from ..ops.backends import on_cpu
from ..tensor import ScaledTensor
from .recipe import Recipe
from .reuse import quantized_weight

__all__ = ["dgrad", "fprop", "of_rows", "sum_groups", "wgrad"]


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
    return _plain(g.mT, x, offsets, dtype)


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


def _plain(a: Tensor, b: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """Products of each group, one after another, of values in the type of ``a``. A CPU may take 50
    times as long for bf16 as for fp32, in which its products are exact, too."""
    wide = torch.promote_types(a.dtype, torch.float32) if on_cpu(a) else a.dtype
    b = b.to(a.dtype)
    return reference.grouped_gemm(a, b, offsets, out_dtype=dtype, compute_dtype=wide)
