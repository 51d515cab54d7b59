"""Products of MXFP8, MXFP4 and NVFP4 matrices on Hopper, widened to bf16 in memory first: exact.

``widened_gemm`` widens in its kernel, once for each tile that needs an element. With more rows than
a few it is faster to write bf16 matrices once, at the speed of memory, and to multiply these.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..common.loadable import loadable
from .dequantized_plan import plan_dequantized
from .widened_config import FEW
from .widened_gemm import widened_gemm

__all__ = ["dequantized_gemm", "exact_gemm", "suits_few"]


def suits_few(a_data: Tensor, b_data: Tensor) -> bool:
    """Whether ``widened_gemm`` multiplies these, and is faster."""
    return a_data.shape[0] <= FEW and all(x.stride(1) == 1 for x in (a_data, b_data))


def exact_gemm(
    a_data: Tensor,
    a_scale: Tensor | None,
    a_format: str | None,
    b_data: Tensor,
    b_scale: Tensor,
    b_format: str,
    **options: Any,
) -> Tensor:
    """``widened_gemm`` of few rows whose operands lie along K, else ``dequantized_gemm``: what is
    faster, of arguments that both have in common."""
    run = dequantized_gemm
    if suits_few(a_data, b_data):
        run, a_data, b_data = widened_gemm, loadable(a_data), loadable(b_data)
        a_scale, b_scale = (
            a_scale if a_scale is None else a_scale.contiguous(),
            b_scale.contiguous(),
        )
    return run(a_data, a_scale, a_format, b_data, b_scale, b_format, **options)


def dequantized_gemm(
    a_data: Tensor,
    a_scale: Tensor | None,
    a_format: str | None,
    b_data: Tensor,
    b_scale: Tensor,
    b_format: str,
    **options: Any,
) -> Tensor:
    """``alpha * A @ B.mT + bias``, as ``widened_gemm`` has it, of operands that may also have their
    other dimension contiguous: a view ``data.mT``, with scales ``scale.mT``. 4-bit elements are
    packed along K. Takes two bytes for each element of a quantized operand while it runs.

    Raises as ``widened_gemm`` does, but neither for many rows nor for rows that lie anyhow.
    """
    if a_format is None:
        a_data = loadable(a_data)
    return widened_gemm(
        a_data, a_scale, a_format, b_data, b_scale, b_format, find=plan_dequantized, **options
    )
