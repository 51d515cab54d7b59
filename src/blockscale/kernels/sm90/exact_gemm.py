"""Products of MXFP8, MXFP4 and NVFP4 matrices on Hopper, widened to bf16: exact.

``mixed_gemm`` writes A in bf16, and widens B in its kernel, once for each tile that needs an
element. Of more than 4096 rows, where B has less than half as many rows as A, where K is not
contiguous, or where TMA cannot load more than 128 rows, both are written in bf16 and multiplied.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..common.calls import CompiledGemm, GemmCall, Operand, multiply
from ..common.loadable import loadable
from ..common.runtime import Described, describe
from .dequant_plan import plan_dequant
from .mixed_choice import ANY_ROWS, widens
from .mixed_plan import plan_mixed

__all__ = ["exact_gemm", "lay", "plan_exact"]


def plan_exact(call: GemmCall) -> CompiledGemm:
    """The plan of what is faster. Raises as ``mixed_gemm`` does, but not for rows that lie anyhow;
    Unsupported where TMA cannot load A that is bf16."""
    return (plan_mixed if _widens(call.a.data, call.b.data) else plan_dequant)(call)


def lay(a: Operand, b: Operand) -> tuple[Operand, Operand]:
    """Operands as ``plan_exact`` takes them: copies where they lie otherwise."""
    if not _widens(describe(a.data), describe(b.data)):
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
    a view ``data.mT``, with scales ``scale.mT``. 4-bit elements are packed along K. Takes two bytes
    for each element of A while it runs, unless that is bf16 of at most 16 rows; and for each of B,
    where that is written in bf16, too.

    ``options`` are those of ``common.calls.multiply``. Raises as ``plan_exact`` does.
    """
    return multiply(plan_exact, *lay(a, b), **options)


def _widens(a: Described, b: Described) -> bool:
    """Whether ``plan_mixed`` takes these, copied if need be, and is faster."""
    if a[1][1] != 1 or b[1][1] != 1:
        return False
    rows, loadable_so = a[0][0], _is_loadable(a) and _is_loadable(b)
    return rows <= ANY_ROWS or (loadable_so and widens(rows, b[0][0]))


def _is_loadable(x: Described) -> bool:
    """Whether its rows start at multiples of 16 bytes."""
    return not (x[3] % 16 or x[1][0] * x[2].itemsize % 16)
