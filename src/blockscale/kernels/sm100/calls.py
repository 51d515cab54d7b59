"""Block-scaled products of torch's tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..common.calls import Operand, multiply
from .plan import plan_gemm
from .quantizing_gemm import gemm_quantize

__all__ = ["gemm", "gemm_quantize"]


def gemm(a: Operand, b: Operand, *, ctas: int | None = None, **options: Any) -> Tensor:
    """``alpha * A @ B.mT + bias`` of block-scaled matrices: (M, N).

    The tensor cores multiply data and scales as they are stored and add up along K as they do; the
    emulator has a model of it, ``emulator/tensorcore/arithmetic.py``.

    Args:
        a: data (M, K) of its format, or its bytes; of 4-bit elements (M, K / 2). K is contiguous,
            or, of 8-bit elements, M, as a transposed view has it. Scales in layout "tcgen05": tiles
            of 512 bytes, one after another. Of format "mxfp8", "mxfp8_e5m2" or "mxfp4", or "nvfp4"
            for both.
        b: (N, K) likewise.
        ctas: CTAs whose tensor cores work together, 1 or 2, instead of those that are chosen.
        options: of ``common.calls.multiply``.

    Raises as that does: Unsupported for data whose rows do not start at a multiple of 16 bytes; of
    MXFP4 with an 8-bit format of 32 bytes, and K a multiple of 128; formats that no instruction
    takes.
    """
    return multiply(partial(plan_gemm, ctas=ctas), a, b, **options)
