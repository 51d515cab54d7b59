"""Products of MXFP8, MXFP4 and NVFP4 matrices on Hopper, widened to bf16: exact.

``mixed_gemm`` widens in its kernel, once for each tile that needs an element. With more rows than
a few it is faster to write bf16 matrices once, at the speed of memory, and to multiply these.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..common.calls import CompiledGemm, GemmCall, Operand, multiply
from ..common.loadable import loadable
from ..common.runtime import Described, describe
from .dequant_plan import plan_dequant
from .mixed_config import MAX_MIXED_M
from .mixed_plan import plan_mixed

__all__ = ["exact_gemm", "lay", "plan_exact"]


def plan_exact(call: GemmCall) -> CompiledGemm:
    """The plan of what is faster. Raises as ``mixed_gemm`` does, but neither for many rows nor
    for rows that lie anyhow; Unsupported where TMA cannot load A that is bf16."""
    few = _suits_few(call.a.data, call.b.data)
    return (plan_mixed if few else plan_dequant)(call)


def lay(a: Operand, b: Operand) -> tuple[Operand, Operand]:
    """Operands as ``plan_exact`` takes them: copies where they lie otherwise."""
    if not _suits_few(describe(a.data), describe(b.data)):
        return a._replace(data=loadable(a.data)) if a.format is None else a, b
    left, right = (
        each._replace(
            data=loadable(each.data),
            scale=None if each.scale is None else each.scale.contiguous(),
        )
        for each in (a, b)
    )
    return left, right


def exact_gemm(a: Operand, b: Operand, **options: Any) -> Tensor:
    """``alpha * A @ B.mT + bias`` of operands that may also have their other dimension contiguous:
    a view ``data.mT``, with scales ``scale.mT``. 4-bit elements are packed along K. With many rows
    takes two bytes for each element of a quantized operand while it runs.

    ``options`` are those of ``common.calls.multiply``. Raises as ``plan_exact`` does.
    """
    return multiply(plan_exact, *lay(a, b), **options)


def _suits_few(a: Described, b: Described) -> bool:
    """Whether ``plan_mixed`` takes these, and is faster."""
    return a[0][0] <= MAX_MIXED_M and a[1][1] == 1 and b[1][1] == 1
