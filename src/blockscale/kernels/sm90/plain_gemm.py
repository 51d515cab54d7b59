"""Products of bf16 matrices on Hopper, with either dimension contiguous."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.calls import Alpha, describe_alpha, sum_of_nothing
from ..gpu.plan import describe
from .plain_plan import plan_plain

__all__ = ["plain_gemm"]


def plain_gemm(
    a: Tensor,
    b: Tensor,
    *,
    alpha: Alpha = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    c: Tensor | None = None,
    accumulate: bool = False,
    arch: str | None = None,
) -> Tensor:
    """``alpha * A @ B.mT + bias``: (M, N), added up in fp32, rounded once. The same bits in every
    run.

    Args:
        a: (M, K) bf16, one of its dimensions contiguous: K, or M, as a transposed view has it.
        b: (N, K) likewise.
        alpha: () fp32; or two of these, whose product it is.
        bias: (N,) in bfloat16, float16 or float32.
        out_dtype: bfloat16, float16 or float32.
        c: written to and returned, (M, N); may have rows that lie apart, and shares no memory with
            the other tensors (not looked at here).
        accumulate: add to ``c`` instead of overwriting it.
        arch: of the kernel where the tensors are on a CPU, for the emulator.

    Raises Unsupported, a ValueError, where there is no kernel: rows (columns, where these are
    contiguous) that do not start at a multiple of 16 bytes, other architectures. ValueError or
    TypeError where shapes, strides or dtypes do not belong together.
    """
    plan = plan_plain(
        describe(a),
        describe(b),
        describe(c),
        describe(bias),
        describe_alpha(alpha),
        out_dtype,
        accumulate,
        a.device,
        arch,
    )
    out = torch.empty_like(plan.out) if c is None else c
    if plan.run is None:
        return sum_of_nothing(out, bias, accumulate)
    assert plan.config is not None
    a = a if plan.config.a_major == "k" else a.T
    b = b if plan.config.b_major == "k" else b.T
    plan.run(a, b, out, bias, alpha, plan.multiprocessors)
    return out
