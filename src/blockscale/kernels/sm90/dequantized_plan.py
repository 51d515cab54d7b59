"""What a call of the product that widens in memory needs, found once for all calls alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...formats import get_format
from ..common.loadable import loadable
from ..common.runtime import Described, architecture
from ..quantizers.dequantize_plan import DequantizePlan, plan_dequantize
from .plain_plan import plan_plain
from .plan import Plan

__all__ = ["plan_dequantized"]

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
def plan_dequantized(
    a: Described,
    a_scale: Described | None,
    a_format: str | None,
    b: Described,
    b_scale: Described,
    b_format: str,
    out: Described | None,
    bias: Described | None,
    alpha: tuple[Described, ...],
    out_dtype: torch.dtype,
    accumulate: bool,
    device: torch.device,
    arch: str | None,
) -> Plan:
    """The plan of a call of ``dequantized_gemm``; raises as it does, and Unsupported where TMA
    cannot load A that is bf16."""
    arch = arch or architecture(device.index)
    # of bf16 as it is, else of whole blocks
    k = a[0][1] if a_format is None else get_format(b_format).element.elements(b[0][1])

    def values(data: Described, scale: Described, format: str) -> _Values:
        shape = data[0][0], k
        plan = plan_dequantize(
            *(data, scale, None, device, format, shape, -1, "compact", None),
            *(torch.bfloat16, arch),
        )
        return _Values(plan)

    left = None if a_format is None or a_scale is None else values(a, a_scale, a_format)
    right = values(b, b_scale, b_format)
    plan = plan_plain(
        a if left is None else left.described(),
        right.described(),
        *(out, bias, alpha, out_dtype, accumulate, device, arch),
    )
    if plan.run is None:
        return plan
    turned = plan.config.a_major != "k"
    return replace(plan, run=_Dequantized(left, turned, right, plan.run))
