"""Block-scaled products on Blackwell, by kernels written in CuTe DSL for sm_100a.

CuTe DSL is imported by the first call. ``plan`` finds what a call needs, once; ``kernel`` is the
kernel, ``config`` how it is chosen, ``kinds`` what the tensor cores multiply. Where the result is
quantized, that is ``quantizing``. There was no such GPU to run them on: they are right in the
emulator, and what they reach is not known.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..common.calls import Alpha, multiply
from ..common.gpu import Gpu
from .plan import plan_gemm
from .quantizing_gemm import gemm_quantize

__all__ = ["gemm", "gemm_quantize"]


def gemm(
    a_data: Tensor,
    a_scale: Tensor,
    a_format: str,
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
    ctas: int | None = None,
) -> Tensor:
    """``alpha * A @ B.mT + bias`` of block-scaled matrices: (M, N).

    The tensor cores multiply data and scales as they are stored and add up along K as they do; the
    emulator has a model of it, ``emulator/tensorcore/arithmetic.py``. The sum is multiplied, added
    to in fp32, and rounded once. The same bits in every run.

    Args:
        a_data: (M, K) of ``a_format``, or its bytes; of 4-bit elements (M, K / 2). K is contiguous,
            or, of 8-bit elements, M, as a transposed view has it.
        a_scale: in layout "tcgen05": tiles of 512 bytes, one after another.
        a_format: "mxfp8", "mxfp8_e5m2" or "mxfp4", or "nvfp4" for both.
        b_data, b_scale, b_format: (N, K) likewise.
        alpha: () fp32; or two of these, whose product it is: NVFP4's global scales.
        bias: (N,) in bfloat16, float16 or float32.
        out_dtype: bfloat16, float16 or float32.
        c: written to and returned, (M, N); may have rows that lie apart, and shares no memory with
            the other tensors (not looked at here).
        accumulate: add to ``c`` instead of overwriting it.
        gpu: to choose the kernel for where the tensors are on a CPU, for the emulator.
        ctas: blocks whose tensor cores work together, 1 or 2, instead of those that are chosen.

    Raises Unsupported, a ValueError, where there is no kernel: data whose rows do not start at a
    multiple of 16 bytes; of MXFP4 with an 8-bit format of 32 bytes, and K a multiple of 128;
    formats that no instruction takes; other architectures. ValueError or TypeError where shapes,
    strides or dtypes do not belong together.
    """
    return multiply(
        partial(plan_gemm, ctas=ctas),
        (a_data, a_scale, a_format),
        (b_data, b_scale, b_format),
        out=c,
        bias=bias,
        alpha=alpha,
        out_dtype=out_dtype,
        accumulate=accumulate,
        gpu=gpu,
    )
