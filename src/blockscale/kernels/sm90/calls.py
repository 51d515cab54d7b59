"""Products of FP8 with fp32 scales, of torch's tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..common.calls import Operand, multiply
from .plan import plan_gemm

__all__ = ["gemm"]


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
