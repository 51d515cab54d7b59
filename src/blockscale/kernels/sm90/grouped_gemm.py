"""Products of groups of rows, each by its own matrix, or of columns, on Hopper: one launch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..common.calls import CompiledGemm, GemmCall, Groups, Operand, multiply
from .config import FORMATS
from .dequant_plan import plan_dequant
from .fp8_by_weights import plan_fp8_by_weights
from .grouped_plan import plan_grouped, plan_k_grouped
from .mixed_plan import plan_mixed

__all__ = ["grouped_gemm", "plan_groups"]


def plan_groups(call: GemmCall) -> CompiledGemm:
    """The plan of a call of ``grouped_gemm``; raises as it does."""
    fp8, exact = plan_grouped, plan_mixed
    if call.grouping == "k":
        fp8, exact = plan_k_grouped, plan_dequant
    if call.b.format in FORMATS:
        return fp8(call)
    return (plan_fp8_by_weights if call.a.format in FORMATS else exact)(call)


def grouped_gemm(a: Operand, b: Operand, groups: Groups, **options: Any) -> Tensor:
    """``A[start:end] @ B[i].mT`` of each group of rows: (M, N); zeros after the last one, unless
    groups are masked. Takes two bytes for each element of A while it runs, unless both are FP8, or
    FP8 kernels multiply it by MXFP4.
    Or ``A[:, start:end] @ B[:, start:end].mT`` of each group of columns: (groups * M, N).

    Args:
        a: as of ``calls.gemm``, or of ``mixed_gemm``.
        b: data (groups, N, K), its matrices one after another. Of format "fp8_128x128" with fp32
            scales (groups, ceil(N / 128), ceil(K / 128)), with any strides; or as of
            ``mixed_gemm``, with scales (groups, N, K / block), one after another. Where columns
            are grouped, as of ``calls.gemm``, both of "fp8_1x128"; or as of ``exact_gemm``, which
            takes two bytes for each element of both.
        groups: whose offsets are on the device of ``a``.
        options: of ``common.calls.multiply``.

    Raises as that does: Unsupported for matrices that do not lie together.
    """
    return multiply(plan_groups, a, b, groups=groups, **options)
