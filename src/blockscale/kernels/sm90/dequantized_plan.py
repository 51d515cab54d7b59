"""What a call of the product that widens in memory needs, found once for all calls alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...formats import get_format
from ..gpu.dequantize_plan import DequantizePlan, plan_dequantize
from ..gpu.plan import Described, architecture
from .plain_plan import plan_plain
from .plan import Plan

__all__ = ["contraction", "plan_dequantized"]


@dataclass(frozen=True, slots=True)
class _Dequantized:
    """A product of bf16 matrices, as which quantized operands are written first.

    Attributes:
        a, b: write them; None of A that is bf16.
        turned: which then has contiguous columns.
        multiply: the product.
    """

    a: DequantizePlan | None
    turned: bool
    b: DequantizePlan
    multiply: Callable[..., Any]

    def __call__(
        self, a: Tensor, a_scale: Tensor | None, b: Tensor, b_scale: Tensor, *rest: Any
    ) -> None:
        if self.a is not None:
            assert a_scale is not None
            a = _written(self.a, a, a_scale)
        elif self.turned:
            a = a.T
        self.multiply(a, _written(self.b, b, b_scale), *rest)


def _written(plan: DequantizePlan, data: Tensor, scale: Tensor) -> Tensor:
    values = torch.empty_like(plan.template)
    plan.write(data, scale, values, None)
    return values


def contraction(a_columns: int, a_format: str | None, b_columns: int, b_format: str) -> int:
    """K, given columns as they are stored: that of A in bf16, else of whole blocks."""
    return a_columns if a_format is None else get_format(b_format).element.elements(b_columns)


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
    """The plan of a call of ``dequantized_gemm`` that copies nothing; raises as it does, and
    Unsupported where TMA cannot load the values as they lie. ``Plan.run`` takes data as bytes."""
    arch = arch or architecture(device.index)
    k = contraction(a[0][1], a_format, b[0][1], b_format)

    def values(data: Described, scale: Described, format: str) -> DequantizePlan:
        shape = data[0][0], k
        return plan_dequantize(
            *(data, scale, None, device, format, shape, -1, "compact", None),
            *(torch.bfloat16, arch),
        )

    left = None if a_format is None or a_scale is None else values(a, a_scale, a_format)
    right = values(b, b_scale, b_format)
    plan = plan_plain(
        a if left is None else _described(left),
        _described(right),
        *(out, bias, alpha, out_dtype, accumulate, device, arch),
    )
    if plan.run is None:
        return plan
    turned = plan.config.a_major != "k"
    return replace(plan, run=_Dequantized(left, turned, right, plan.run))


def _described(plan: DequantizePlan) -> Described:
    """The matrix that will be written, in memory of its own."""
    rows, columns = plan.template.shape
    shape, stride = torch.Size((rows, columns)), (columns, 1)
    if plan.turned:
        shape, stride = torch.Size((columns, rows)), (1, columns)
    return shape, stride, torch.bfloat16, 0
