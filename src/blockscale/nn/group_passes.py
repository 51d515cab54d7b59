"""The three products of weights with rows in groups, quantized as a recipe says.

Weights are (groups, N, K), or, ``transposed``, (groups, K, N): parameters as they are, since a view
of one would not be known to ``reuse_weights``. ``recipe`` None: nothing is quantized, and products
are those of the operands' type.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..gemm import grouped_gemm
from ..ops import global_scale
from ..ops.backends import on_cpu
from ..routing import sizes_of
from ..tensor import ScaledTensor
from . import held_groups, observing
from .forms import quantize_forms
from .group_launches import QuantizedRows
from .recipe import Recipe
from .reuse import quantized_weight

__all__ = [
    "Operand",
    "Product",
    "Weight",
    "add_wgrad",
    "dgrad",
    "fprop",
    "grouped_mm",
    "of_rows",
    "sum_groups",
    "wgrad",
]


_MOST_GROUPS = 1024  # of torch's grouped_mm, and one

#: Matrices of all groups; or of two stacks, whose rows lie below each other in each group.
Weight = Tensor | tuple[Tensor, Tensor]
#: Grouped rows: quantized, or plain.
Operand = Tensor | QuantizedRows


class Product(NamedTuple):
    """How rows are multiplied: ``dtype`` is that of the result, ``transposed`` as above. ``dgrad``:
    a backward will multiply by the same weight. ``weight_scale``: the global scale of the weight,
    where it is not its own."""

    recipe: Recipe | None
    dtype: torch.dtype
    transposed: bool = False
    dgrad: bool = False
    weight_scale: Tensor | None = None


def fprop(x: Operand, weight: Weight, offsets: Tensor, how: Product) -> Tensor:
    """``x[start:end] @ weight[i].T`` of each group; ``x`` is quantized by rows, or plain."""
    return _product(x, weight, offsets, how, how.transposed)


def dgrad(g: Operand, weight: Weight, offsets: Tensor, how: Product) -> Tensor:
    """``g[start:end] @ weight[i]`` of each group; ``g`` is quantized by rows, or plain."""
    return _product(g, weight, offsets, how, not how.transposed)


def wgrad(
    g: Operand, x: Operand, offsets: Tensor, dtype: torch.dtype, transposed: bool = False
) -> Tensor:
    """``g[start:end].T @ x[start:end]`` of each group: like the weight. Both are quantized by
    columns, or plain."""
    g, x = (x, g) if transposed else (g, x)
    if isinstance(g, QuantizedRows) and isinstance(x, QuantizedRows):
        product = g.launches.multiply_k_grouped(g, x, dtype)
        if product is not None:
            return product
    g, x = _tensor(g), _tensor(x)
    if isinstance(g, ScaledTensor) and isinstance(x, ScaledTensor):
        return grouped_gemm(g.mT, x, offsets, dtype)
    return _plain(g.mT, x, offsets, dtype)


def add_wgrad(
    main_grad: Tensor, g: Operand, x: Operand, offsets: Tensor, transposed: bool = False
) -> None:
    """``wgrad``, added to ``main_grad``: inside the product, where operands are quantized."""
    g, x = map(_tensor, (x, g) if transposed else (g, x))
    if isinstance(g, ScaledTensor) and isinstance(x, ScaledTensor):
        grouped_gemm(g.mT, x, offsets, out=main_grad, accumulate=True)
    elif g.numel() and x.numel():
        wide = torch.promote_types(g.dtype, torch.float32)
        main_grad.add_(_plain(g.mT, x, offsets, wide))


def of_rows(values: Tensor, rows: int, offsets: Tensor) -> Tensor:
    """Of each row the group's of ``values`` (groups, N); zeros for rows of no group."""
    row = torch.arange(rows, device=offsets.device, dtype=torch.int32)
    group = torch.searchsorted(offsets, row, right=True)
    return torch.cat((values, torch.zeros_like(values[:1])))[group]


def sum_groups(x: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """Of each group's rows (groups, N), added up in fp32, or in float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    sizes = torch.cat((sizes_of(offsets), len(x) - offsets[-1:])).long()  # and that of no group
    total = torch.segment_reduce(wide, "sum", lengths=sizes, axis=0, initial=0.0, unsafe=True)
    return total[:-1].to(dtype)


def _tensor(x: Operand) -> Tensor:
    return x.tensor() if isinstance(x, QuantizedRows) else x


def _product(x: Operand, weight: Weight, offsets: Tensor, how: Product, upright: bool) -> Tensor:
    """``x[start:end] @ weight[i]`` of each group, or, unless weights are ``upright``, by their
    transposes."""
    if held_groups.is_held(weight):
        return held_groups.product(_tensor(x), weight, offsets, how.dtype, upright=upright)
    if isinstance(x, QuantizedRows) and isinstance(weight, Tensor):
        axis = -2 if upright else -1
        product = x.launches.multiply(x, weight, how.dtype, axis=axis, dgrad=how.dgrad)
        if product is not None:
            return product
    x = _tensor(x)
    if not isinstance(x, ScaledTensor):
        whole = torch.cat(weight, 1) if isinstance(weight, tuple) else weight
        return _plain(x, whole if upright else whole.mT, offsets, how.dtype)
    w = _quantized(weight, how, columns=upright)
    observing.saw("weights", weight, **{"fprop" if upright == how.transposed else "dgrad": w})
    return grouped_gemm(x, w if upright else w.mT, offsets, how.dtype)


def _quantized(weight: Weight, product: Product, *, columns: bool) -> ScaledTensor:
    """Blocked along columns, or along rows."""
    recipe = product.recipe
    assert recipe is not None
    dgrad = product.dgrad and "dgrad" not in recipe.high_precision
    format = recipe.format_of("weights")
    given: Any = {"rows": not columns, "columns": columns}

    def made(each: Tensor, scale: Tensor | None = None) -> ScaledTensor:
        how = recipe.operand("weights")
        if scale is None:
            scalar = product.weight_scale
            forms = quantized_weight(each, how, **given, dgrad=dgrad, global_scale=scalar)
        else:  # it depends on the other stack: nothing to be reused
            forms = quantize_forms(each, how, **given, global_scale=scale)
        found = forms.columns if columns else forms.rows
        assert found is not None
        return found

    if isinstance(weight, Tensor):
        return made(weight)
    extent = format.block_size if columns else format.block[0]
    if weight[0].shape[1] % extent:  # a block has rows of both
        return made(torch.cat(weight, 1))
    scale = None
    if format.has_global_scale:
        found = [global_scale(each.detach(), format.name) for each in weight]
        scale = torch.maximum(*found)
    joined: Any = torch.cat([made(each, scale) for each in weight], 1)
    return joined


def _plain(a: Tensor, b: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """Products of each group, of values in the type of ``a``: in bf16 on a GPU by torch's product
    of groups, else one after another. A CPU may take 50 times as long for bf16 as for fp32, in
    which its products are exact, too."""
    if not (a.numel() and b.numel()):  # no group's ends need be known
        groups = (len(offsets),) if b.dim() == 2 else ()
        return a.new_zeros(*groups, a.shape[0], b.shape[-1], dtype=dtype)
    b = b.to(a.dtype)
    if _on_gpu(a) and a.dtype == torch.bfloat16 and len(offsets) < _MOST_GROUPS:
        matrices = _for_grouped_mm(a, b)
        if all(map(_is_aligned, matrices)):
            return grouped_mm(*matrices, offsets).to(dtype)
    wide = torch.promote_types(a.dtype, torch.float32) if on_cpu(a) else a.dtype
    return reference.grouped_gemm(a, b, offsets, out_dtype=dtype, compute_dtype=wide)


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """torch's, of bf16, with zeros where it leaves memory as it is: in rows of no group, and in
    matrices of groups without rows. Nothing is read back from the device."""
    product = torch.nn.functional.grouped_mm(a, b, offs=offsets)
    if b.dim() == 3:
        rows = torch.arange(len(a), device=a.device, dtype=torch.int32)
        product = product.masked_fill_((rows >= offsets[-1])[:, None], 0)
    else:
        product = product.masked_fill_((sizes_of(offsets) == 0)[:, None, None], 0)
    return product.contiguous()  # rows of it may lie apart


def _for_grouped_mm(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Copies where groups could begin at any byte: rows of ``a`` together where these are grouped,
    its columns and rows of ``b`` where what they contract is."""
    if b.dim() == 3:
        return a.contiguous(), b
    return a.mT.contiguous().mT, b.contiguous()


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _is_aligned(x: Tensor) -> bool:
    """Whether rows, or columns, are contiguous, start at multiples of 16 bytes, and do not
    overlap."""
    rows, columns = x.stride()[-2:]
    together, apart = (x.shape[-1], rows) if columns == 1 else (x.shape[-2], columns)
    start = 0 if torch.compiler.is_compiling() else x.storage_offset()  # which it does not trace
    strides = start, apart, *x.stride()[:-2]
    aligned = not any(n * x.element_size() % 16 for n in strides)
    return x.numel() > 0 and 1 in (rows, columns) and apart >= together and aligned
