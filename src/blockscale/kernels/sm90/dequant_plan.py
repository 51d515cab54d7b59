"""What a call of the product that widens in memory needs, found once for all calls alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...formats import get_format
from ..common.calls import CompiledGemm, GemmCall, OperandSpec
from ..common.loadable import loadable
from ..common.runtime import Described
from ..quantizers.calls import DequantizeCall, DequantizePlan, plan_dequantize
from .bf16_plan import plan_bf16
from .plan import octets

__all__ = ["plan_dequant"]

_ALIGNED = 8  # elements whose lines TMA loads start at multiples of so many


@dataclass(frozen=True, slots=True)
class _Values:
    """Writes an operand in bf16, its lines (rows, or columns where these lie together) where TMA
    can load them."""

    plan: DequantizePlan

    @property
    def line(self) -> int:
        """Elements of a line."""
        return self.plan.template.shape[1]

    def __call__(self, data: Tensor, scale: Tensor) -> Tensor:
        """The matrix, or its transpose where that has contiguous rows."""
        values = torch.empty_like(self.plan.template)
        self.plan.write(data, scale, values, None)
        return loadable(values) if self.line % _ALIGNED else values

    def described(self) -> Described:
        """The matrix that will be written."""
        shape, stride = self.plan.template.shape, (-(-self.line // _ALIGNED) * _ALIGNED, 1)
        if self.plan.turned:
            shape, stride = torch.Size(shape[::-1]), stride[::-1]
        return shape, stride, torch.bfloat16, 0


@dataclass(frozen=True, slots=True)
class _Dequantized:
    """A product of bf16 matrices, as which quantized operands are written first.

    Attributes:
        a, b: write them; None of A that is bf16.
        turned: which then has contiguous columns.
        multiply: the product.
    """

    a: _Values | None
    turned: bool
    b: _Values
    multiply: Callable[..., Any]

    def __call__(
        self, a: Tensor, a_scale: Tensor | None, b: Tensor, b_scale: Tensor, *rest: Any
    ) -> None:
        if self.a is not None:
            assert a_scale is not None
            a = self.a(a, a_scale)
        elif self.turned:
            a = a.T
        self.multiply(a, self.b(b, b_scale), *rest)


@lru_cache(maxsize=4096)
def plan_dequant(call: GemmCall) -> CompiledGemm:
    """The plan of a product of bf16 values, as which quantized operands are written first; raises
    as ``plan_exact`` does."""
    a, b = call.a, call.b
    # of bf16 as it is, else of whole blocks
    k = a.data[0][1] if a.format is None else get_format(b.format).element.elements(b.data[0][1])
    left, right = (None if each.format is None else _values(each, k, call) for each in (a, b))
    assert right is not None
    plan = plan_bf16(
        call._replace(
            a=OperandSpec(a.data if left is None else left.described()),
            b=OperandSpec(right.described()),
        )
    )
    if plan.run is None:
        return plan
    turned = plan.config.a_major != "k"
    return replace(plan, run=_Dequantized(left, turned, right, plan.run), views=octets)


def _values(x: OperandSpec, k: int, call: GemmCall) -> _Values:
    """What writes ``k`` columns of an operand."""
    assert x.format is not None
    assert x.scale is not None
    shape = x.data[0][0], k
    return _Values(
        plan_dequantize(
            DequantizeCall(x.data, x.scale, None, call.device, call.gpu, x.format, shape)
        )
    )
