"""Products of MXFP8, MXFP4, NVFP4 or bf16 by matrices that are widened in registers, on Hopper:
exact.

Hopper's tensor cores know no block scales. An element times its block's scale has few bits (E4M3
times a power of two: four; E2M1 times UE4M3: six), so bf16 holds it, and bf16 products are the same
as those that Blackwell's tensor cores form.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..common.calls import Operand, multiply
from .mixed_plan import plan_mixed

__all__ = ["mixed_gemm"]


def mixed_gemm(a: Operand, b: Operand, **options: Any) -> Tensor:
    """``alpha * A @ B.mT + bias``: (M, N), added up in fp32. Takes two bytes for each element of A
    while it runs, unless it is bf16 of at most 16 rows.

    Each element times its block's scale is exact in bf16, but for multiples of less than 2^-133,
    which are rounded to that: E4M3 with scales below 2^-124, E5M2 with scales below 2^-117. What
    overflows fp32 when it is dequantized is infinite here, too. A NaN makes the sums of its row of
    A, or of B, NaN; so do NaN scales; infinities of E5M2 stay infinite.

    Args:
        a: data (M, K) as bytes of elements, two in a byte where they have four bits; or bf16.
            Scales compact, (M, K / block) bytes. Of format "mxfp8", "mxfp8_e5m2",
            "mxfp4" or "nvfp4".
        b: likewise, (N, K) and (N, K / block); not bf16.
        options: of ``common.calls.multiply``.

    Raises as that does: Unsupported for data whose rows do not start at a multiple of 16 bytes.
    """
    return multiply(plan_mixed, a, b, **options)
