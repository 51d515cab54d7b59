"""Block-scaled products on Hopper, by kernels written in CuTe DSL for sm_90a.

CuTe DSL is imported by the first call. ``plan`` finds what a call needs, once; ``kernel`` is
the kernel, ``config`` how it is chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.calls import Alpha, multiply
from ..common.gpu import Gpu
from .plan import plan_gemm

__all__ = ["gemm"]


def gemm(
    a_data: Tensor,
    a_scale: Tensor,
    b_data: Tensor,
    b_scale: Tensor,
    *,
    b_format: str = "fp8_128x128",
    out_dtype: torch.dtype = torch.bfloat16,
    c: Tensor | None = None,
    accumulate: bool = False,
    bias: Tensor | None = None,
    alpha: Alpha = None,
    gpu: Gpu | None = None,
) -> Tensor:
    """``alpha * A @ B.mT + bias`` of E4M3 matrices with fp32 scales: (M, N).

    The products of 128 elements along K are summed, then scaled in fp32 and added up along K in
    fp32; the sum is multiplied, added to in fp32, and rounded once. The same bits in every run.

    Args:
        a_data: (M, K) E4M3, or its bytes.
        a_scale: of 1 x 128 elements, in layout "sm90": fp32 (ceil(K / 128), M padded to 4).
        b_data: (N, K) E4M3, or its bytes.
        b_scale: of 128 x 128 elements, compact: fp32 (ceil(N / 128), ceil(K / 128)), with any
            strides; or with ``b_format`` "fp8_1x128" as those of A.
        out_dtype: bfloat16, float16 or float32.
        c: written to and returned, (M, N); may have rows that lie apart, and shares no memory with
            the other tensors (not looked at here).
        accumulate: add to ``c`` instead of overwriting it.
        bias: (N,) in bfloat16, float16 or float32.
        alpha: () fp32; or two of these, whose product it is.
        gpu: to choose the kernel for where the tensors are on a CPU, for the emulator.

    Raises Unsupported, a ValueError, where there is no kernel: K no multiple of 16, data whose rows
    do not start at a multiple of 16 bytes, other architectures. ValueError or TypeError where
    shapes, strides or dtypes do not belong together.
    """
    return multiply(
        plan_gemm,
        (a_data, a_scale, "fp8_1x128"),
        (b_data, b_scale, b_format),
        out=c,
        bias=bias,
        alpha=alpha,
        out_dtype=out_dtype,
        accumulate=accumulate,
        gpu=gpu,
    )
