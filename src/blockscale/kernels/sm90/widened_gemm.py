"""Products of few rows of MXFP8, MXFP4, NVFP4 or bf16 by matrices of these, on Hopper: exact.

Hopper's tensor cores know no block scales. An element times its block's scale has few bits (E4M3
times a power of two: four; E2M1 times UE4M3: six), so bf16 holds it, and bf16 products are the same
as those that Blackwell's tensor cores form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.calls import Alpha, multiply
from ..common.gpu import Gpu
from .widened_plan import plan_widened

__all__ = ["widened_gemm"]


def widened_gemm(
    a_data: Tensor,
    a_scale: Tensor | None,
    a_format: str | None,
    b_data: Tensor,
    b_scale: Tensor,
    b_format: str,
    *,
    alpha: Alpha = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    c: Tensor | None = None,
    accumulate: bool = False,
    gpu: Gpu | None = None,
) -> Tensor:
    """``alpha * A @ B.mT + bias``: (M, N), added up in fp32, rounded once. The same bits in every
    run. Takes two bytes for each element of A while it runs, unless it is bf16 of at most 16 rows.

    Each element times its block's scale is exact in bf16, but for multiples of less than 2^-133,
    which are rounded to that: E4M3 with scales below 2^-124, E5M2 with scales below 2^-117. What
    overflows fp32 when it is dequantized is infinite here, too. A NaN makes the sums of its row of
    A, or of B, NaN; so do NaN scales; infinities of E5M2 stay infinite.

    Args:
        a_data: (M, K) bytes of elements, two in a byte where they have four bits; or bf16. M is 128
            at most.
        a_scale: compact, (M, K / block) bytes; None for bf16.
        a_format: "mxfp8", "mxfp8_e5m2", "mxfp4" or "nvfp4"; None for bf16.
        b_data, b_scale, b_format: likewise, (N, K) and (N, K / block).
        alpha: () fp32; or two of these, whose product it is: NVFP4's global scales.
        bias: (N,) in bfloat16, float16 or float32.
        out_dtype: bfloat16, float16 or float32.
        c: written to and returned, (M, N); may have rows that lie apart, and shares no memory with
            the other tensors (not looked at here).
        accumulate: add to ``c`` instead of overwriting it.
        gpu: to choose the kernel for where the tensors are on a CPU, for the emulator.

    Raises Unsupported, a ValueError, where there is no kernel: more rows of A (``exact_gemm`` takes
    them), data whose rows do not start at a multiple of 16 bytes, other formats and
    architectures. ValueError or TypeError where shapes, strides or dtypes do not belong together.
    """
    return multiply(
        plan_widened,
        (a_data, a_scale, a_format),
        (b_data, b_scale, b_format),
        out=c,
        bias=bias,
        alpha=alpha,
        out_dtype=out_dtype,
        accumulate=accumulate,
        gpu=gpu,
    )
