"""Products of MXFP8, MXFP4 and NVFP4 matrices on Hopper, widened to bf16: exact.

``widened_gemm`` widens in its kernel, once for each tile that needs an element. With more rows than
a few it is faster to write bf16 matrices once, at the speed of memory, and to multiply these.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..common.calls import CompiledGemm, GemmCall, multiply
from ..common.loadable import loadable
from ..common.runtime import Described, describe
from .dequantized_plan import plan_dequantized
from .widened_config import FEW
from .widened_plan import plan_widened

__all__ = ["exact_gemm", "lay", "plan_exact"]

_Given = tuple[Tensor, Tensor | None, str | None]  # data, scales and format


def plan_exact(call: GemmCall) -> CompiledGemm:
    """The plan of what is faster. Raises as ``widened_gemm`` does, but neither for many rows nor
    for rows that lie anyhow; Unsupported where TMA cannot load A that is bf16."""
    few = _suits_few(call.a.data, call.b.data)
    return (plan_widened if few else plan_dequantized)(call)


def lay(a: _Given, b: _Given) -> tuple[_Given, _Given]:
    """Operands as ``plan_exact`` takes them: copies where they lie otherwise."""
    (a_data, a_scale, a_format), (b_data, b_scale, b_format) = a, b
    if not _suits_few(describe(a_data), describe(b_data)):
        return (loadable(a_data) if a_format is None else a_data, a_scale, a_format), b
    a_scale, b_scale = (None if x is None else x.contiguous() for x in (a_scale, b_scale))
    return (loadable(a_data), a_scale, a_format), (loadable(b_data), b_scale, b_format)


def exact_gemm(a: _Given, b: _Given, **options: Any) -> Tensor:
    """``alpha * A @ B.mT + bias`` of operands that may also have their other dimension contiguous:
    a view ``data.mT``, with scales ``scale.mT``. 4-bit elements are packed along K. With many rows
    takes two bytes for each element of a quantized operand while it runs.

    ``options`` are those of ``common.calls.multiply``. Raises as ``plan_exact`` does.
    """
    return multiply(plan_exact, *lay(a, b), **options)


def _suits_few(a: Described, b: Described) -> bool:
    """Whether ``plan_widened`` takes these, and is faster."""
    return a[0][0] <= FEW and a[1][1] == 1 and b[1][1] == 1
