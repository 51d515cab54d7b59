"""What the steps of ``experts`` launch, found once for steps alike: quantizers of grouped rows, and
the products that read these.

A launch is looked up by all that decides it: the recipe, and how what it reads lies. There is none
where torch looks on. Where no kernel quantizes, ``group_operands.operands`` makes tensors; where
only a product has no launch, ``group_passes`` makes tensors of what is quantized.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.common.calls import Groups
from ..kernels.common.runtime import describe, gpu_of
from ..tensor import ScaledTensor
from ..tensor_checks import checks_values
from ..watching import is_plain, unwatched
from .group_operands import Operands, Source
from .plan_cache import planned
from .product_launches import ProductLaunch, ProductOperand
from .quantize_launches import Asked, Grouped, GroupedLaunch, Parts
from .recipe import Recipe
from .weight_launch import WeightLaunch

__all__ = ["QuantizedRows", "multiply_groups", "multiply_k_grouped", "quantize_grouped"]

_META = torch.device("meta")


class QuantizedRows(NamedTuple):
    """Grouped rows quantized along ``axis``, as kernels write and read them."""

    parts: Parts
    launch: GroupedLaunch
    axis: int
    offsets: Tensor

    def tensor(self) -> ScaledTensor:
        return self.launch.form(self.parts, self.axis, self.offsets)


def multiply_groups(
    x: QuantizedRows,
    weight: Tensor,
    recipe: Recipe,
    dtype: torch.dtype,
    *,
    weight_axis: int,
    dgrad: bool,
) -> Tensor | None:
    """The rows of each group times its matrix, which is quantized along ``weight_axis``: -1 of
    (groups, N, K), -2 of (groups, K, N). ``dgrad`` as of ``quantized_weight``. None where there is
    no launch."""
    if not (unwatched() and is_plain(weight)) or weight.device != x.offsets.device:
        return None
    described = weight.shape, weight.stride(), weight.dtype
    key = "grouped product", x.launch, recipe, described, dtype, weight_axis
    found = planned(key, lambda: _WeightProduct(x, weight, recipe, dtype, weight_axis))
    return None if found is None else found(x, weight, dgrad=dgrad)


class _WeightProduct:
    """Rows times the weights of their groups. Raises ValueError or TypeError where kernels do not
    quantize the weights."""

    def __init__(
        self, x: QuantizedRows, weight: Tensor, recipe: Recipe, dtype: torch.dtype, axis: int
    ) -> None:
        self._weight = WeightLaunch(describe(weight), weight.device, recipe, axis)
        self._multiply = ProductLaunch(
            ProductOperand(x.launch, -1),
            ProductOperand(self._weight.launch, axis, turned=axis == -1),
            None,
            dtype,
            (x.launch.shape[0], weight.shape[-3 - axis]),
            weight.device,
            Groups(torch.empty_like(x.offsets, device=_META)),
        )

    def __call__(self, x: QuantizedRows, weight: Tensor, *, dgrad: bool) -> Tensor:
        return self._multiply(x.parts, self._weight(weight, dgrad=dgrad), None, x.offsets)


def multiply_k_grouped(g: QuantizedRows, x: QuantizedRows, dtype: torch.dtype) -> Tensor | None:
    """``g[start:end].T @ x[start:end]`` of each group (groups, M, N); None where there is no
    launch."""
    key = "k-grouped product", g.launch, x.launch, dtype
    found = planned(key, lambda: _plan_k_grouped(g, x, dtype))
    return None if found is None else found(g.parts, x.parts, None, g.offsets)


def _plan_k_grouped(g: QuantizedRows, x: QuantizedRows, dtype: torch.dtype) -> ProductLaunch:
    offsets = torch.empty_like(g.offsets, device=_META)
    shape = len(offsets), g.launch.shape[1], x.launch.shape[1]
    sources = ProductOperand(g.launch, -2, turned=True), ProductOperand(x.launch, -2)
    return ProductLaunch(*sources, None, dtype, shape, g.offsets.device, Groups(offsets, "k"))


def quantize_grouped(
    source: Source,
    recipe: Recipe | None,
    role: str,
    offsets: Tensor,
    *,
    rows: bool,
    columns: bool,
) -> Operands | None:
    """What is asked for of ``source``, as ``group_operands.operands`` has it; None where there is
    no launch."""
    if recipe is None or recipe.high_precision or not (rows or columns):
        return None
    device, gpu = offsets.device, gpu_of(offsets.device)
    if gpu is None or not unwatched() or checks_values():
        return None
    inputs = source.inputs()
    if inputs is None:
        return None
    producer, matrices, shape, gather, weights = inputs
    if not all(map(is_plain, matrices)) or not (weights is None or is_plain(weights)):
        return None
    matrices = tuple(x.detach() if x.requires_grad else x for x in matrices)
    described = tuple([(x.shape, x.stride(), x.dtype) for x in matrices])
    grouped = Grouped(len(offsets), shape, gather is not None, producer)
    key: Any = "grouped rows", grouped, described, recipe, role, rows, columns, device, gpu

    def made() -> GroupedLaunch:
        asked = Asked.of(recipe, role, device, rows=rows, columns=columns)
        return GroupedLaunch(tuple(map(describe, matrices)), grouped, asked)

    launch = planned(key, made)
    if launch is None:
        return None
    along_rows, along_columns, of_weights = launch(matrices, offsets, gather, weights)
    return Operands(
        None if along_rows is None else QuantizedRows(along_rows, launch, -1, offsets),
        None if along_columns is None else QuantizedRows(along_columns, launch, -2, offsets),
        of_weights,
    )
