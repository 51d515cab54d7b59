"""What the steps of ``experts`` launch, found once for steps alike: quantizers of grouped rows, and
the products that read these.

Calls alike share them (:func:`call_key`). There are none where torch looks on. Where no kernel
quantizes, ``group_operands.operands`` makes tensors; where only a product has no launch,
``group_passes`` makes tensors of what is quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..kernels.common.calls import Groups
from ..kernels.common.runtime import describe, gpu_of
from ..tensor import ScaledTensor
from ..tensor_checks import checks_values
from ..watching import is_eager, is_plain
from . import observing
from .group_operands import Operands, QuantizeInputs
from .output_dtype import output_dtype
from .plan_cache import UNKNOWN, attempt
from .product_launches import ProductLaunch, ProductOperand
from .quantize_launches import Asked, Grouped, GroupedLaunch, Parts
from .recipe import Recipe
from .weight_launch import WeightLaunch

__all__ = ["Launches", "QuantizedRows", "call_key"]

_META = torch.device("meta")

P = TypeVar("P")


def call_key(recipe: Recipe | None, tensors: Sequence[Tensor | None], *others: Any) -> Any:
    """Calls with the same key pass the same checks and launch the same, but for values of tensors;
    None where torch has to look on, where these values are looked at, and without kernels.

    The first of ``tensors`` is x.
    """
    x = tensors[0]
    if observing.observer is not None:
        return None
    if not is_eager() or type(recipe) is not Recipe or checks_values():
        return None
    if x is None or not is_plain(x):
        return None
    gpu = gpu_of(x.device)
    if gpu is None:
        return None
    described: list[Any] = []
    for each in tensors:
        if each is None:
            described.append(None)
        elif is_plain(each):
            described.append((each.shape, each.stride(), each.dtype, each.device))
        else:
            return None
    return gpu, recipe, output_dtype(x), torch.is_grad_enabled(), others, *described


class QuantizedRows(NamedTuple):
    """Grouped rows quantized along ``axis``, as kernels write and read them; ``launches``: of calls
    alike."""

    parts: Parts
    launch: GroupedLaunch
    axis: int
    offsets: Tensor
    launches: Launches

    def tensor(self) -> ScaledTensor:
        return self.launch.form(self.parts, self.axis, self.offsets)


class Launches:
    """What the steps of calls alike launch, each found when it comes first."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._found: dict[Any, Any] = {}  # None: there is none

    def quantize(
        self, inputs: QuantizeInputs, role: str, offsets: Tensor, *, rows: bool, columns: bool
    ) -> Operands | None:
        """What is asked for of rows that play this role; None where there is no launch."""
        producer, matrices, shape, gather, weights = inputs
        key = producer, role, rows, columns, shape, matrices[0].dtype, gather is None
        given = inputs, self._recipe, role, offsets, rows, columns
        launch = self._find(key, _plan_quantizer, *given)
        if launch is None:
            return None
        matrices = tuple([x.detach() if x.requires_grad else x for x in matrices])
        row_parts, column_parts, d_row_weights = launch(matrices, offsets, gather, weights)
        along_rows = along_columns = None
        if row_parts is not None:
            along_rows = QuantizedRows(row_parts, launch, -1, offsets, self)
        if column_parts is not None:
            along_columns = QuantizedRows(column_parts, launch, -2, offsets, self)
        return Operands(along_rows, along_columns, d_row_weights)

    def multiply(
        self, x: QuantizedRows, weight: Tensor, dtype: torch.dtype, *, axis: int, dgrad: bool
    ) -> Tensor | None:
        """The rows of each group times its matrix, which is quantized along ``axis``: -1 of
        (groups, N, K), -2 of (groups, K, N). ``dgrad`` as of ``quantized_weight``. None where there
        is no launch."""
        key = x.launch, axis, weight.shape, weight.stride()  # hooks of saved tensors change these
        product = self._find(key, _WeightProduct, x, weight, self._recipe, dtype, axis)
        return None if product is None else product(x, weight, dgrad=dgrad)

    def multiply_k_grouped(
        self, g: QuantizedRows, x: QuantizedRows, dtype: torch.dtype
    ) -> Tensor | None:
        """``g[start:end].T @ x[start:end]`` of each group (groups, M, N); None where there is no
        launch."""
        key = g.launch, x.launch, dtype
        product = self._find(key, _plan_k_grouped, g, x, dtype)
        return None if product is None else product(g.parts, x.parts, None, g.offsets)

    def _find(self, key: Any, make: Callable[..., P], *args: Any) -> P | None:
        found: Any = self._found.get(key, UNKNOWN)
        if found is UNKNOWN:
            found = self._found[key] = attempt(make, *args)
        return found


def _plan_quantizer(
    inputs: QuantizeInputs, recipe: Recipe, role: str, offsets: Tensor, rows: bool, columns: bool
) -> GroupedLaunch:
    producer, matrices, shape, gather, _ = inputs
    asked = Asked.of(recipe, role, offsets.device, rows=rows, columns=columns)
    grouped = Grouped(len(offsets), shape, gather is not None, producer)
    return GroupedLaunch(tuple(map(describe, matrices)), grouped, asked)


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


def _plan_k_grouped(g: QuantizedRows, x: QuantizedRows, dtype: torch.dtype) -> ProductLaunch:
    offsets = torch.empty_like(g.offsets, device=_META)
    shape = len(offsets), g.launch.shape[1], x.launch.shape[1]
    sources = ProductOperand(g.launch, -2, turned=True), ProductOperand(x.launch, -2)
    return ProductLaunch(*sources, None, dtype, shape, g.offsets.device, Groups(offsets, "k"))
