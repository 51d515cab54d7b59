"""Products of FP8 with fp32 scales, of torch's tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..common.calls import Operand, multiply
from .grouped_plan import plan_grouped
from .plan import plan_gemm

__all__ = ["gemm", "grouped_gemm"]


def gemm(a: Operand, b: Operand, **options: Any) -> Tensor:
    """``alpha * A @ B.mT + bias`` of E4M3 matrices with fp32 scales: (M, N).

    The products of 128 elements along K are summed, then scaled in fp32 and added up along K in
    fp32.

    Args:
        a: data (M, K) of E4M3, or its bytes; scales of 1 x 128 elements, in layout "sm90": fp32
            (ceil(K / 128), M padded to 4).
        b: (N, K) likewise; scales of format "fp8_128x128", compact: fp32 (ceil(N / 128),
            ceil(K / 128)), with any strides; or of "fp8_1x128" as those of A.
        options: of ``common.calls.multiply``.

    Raises as that does: Unsupported where K is no multiple of 16, or rows of data do not start at a
    multiple of 16 bytes.
    """
    return multiply(plan_gemm, a, b, **options)


def grouped_gemm(a: Operand, b: Operand, offsets: Tensor, **options: Any) -> Tensor:
    """``A[start:end] @ B[i].mT`` of each group of rows: (M, N); zeros after the last one.

    Args:
        a: as of :func:`gemm`.
        b: data (groups, N, K), its matrices one after another; scales of format "fp8_128x128",
            compact: fp32 (groups, ceil(N / 128), ceil(K / 128)), with any strides.
        offsets: int32 (groups,), the end of each group, on the device of ``a``.
        options: of ``common.calls.multiply``.

    Raises as that does.
    """
    return multiply(plan_grouped, a, b, offsets=offsets, **options)
