"""A product whose rows ranks bring together meanwhile, of torch's tensors."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor

from ...dtypes import from_torch
from ..common.calls import (
    CompiledGemm,
    GemmCall,
    Operand,
    check_loadable,
    check_matrix,
    describe_call,
)
from ..common.gpu import Gpu, Unsupported
from ..common.template import template
from ..ranks.gather_memory import GatherMemory
from ..ranks.gather_sizes import GatherSizes, why_not_gather
from .gather_config import choose_gather, why_not
from .plan import BYTES, check_rows, check_scale, octets

__all__ = ["gather_gemm"]


def gather_gemm(
    memory: GatherMemory,
    a: Operand,
    b: Operand,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    limit: float = 100.0,
    gpu: Gpu | None = None,
) -> Tensor:
    """``A @ B.mT + bias`` (ranks * rows, N), where A has the rows of all ranks one after another;
    all ranks of ``memory`` launch it.

    Args:
        a: this rank's rows (rows, K) of E4M3, or its bytes, with scales in layout "sm90": fp32
            (K / 128, rows).
        b: (N, K), scales of format "fp8_128x128", compact.
        limit: seconds to wait for another rank; then ``memory.missing`` tells which, and rows that
            did not come have NaN.

    Raises Unsupported, a ValueError, where there is no kernel; ValueError or TypeError where shapes
    or dtypes do not belong together.
    """
    call = describe_call(a, b, bias=bias, out_dtype=out_dtype, gpu=gpu)
    sizes = GatherSizes(memory.ranks, *a.data.shape)
    compiled = _plan(call, sizes)
    out = torch.empty_like(compiled.out)
    assert compiled.run is not None
    own, own_scale, b_data, b_scale = compiled.views(a.data, a.scale, b.data, b.scale)
    compiled.run(
        *(own, own_scale, memory.data(sizes), memory.scale(sizes), b_data, b_scale),
        *(out, bias, None),
        (memory.start, memory.peers, memory.signals),
        (memory.rank, round(limit * 1e9)),
        *compiled.rest,
    )
    return out


@lru_cache(maxsize=4096)
def _plan(call: GemmCall, sizes: GatherSizes) -> CompiledGemm:
    a, b, n = call.a, call.b, call.b.data[0][0]
    for name, each in (("a_data", a), ("b_data", b)):
        check_matrix(name, each.data, BYTES)
    if b.data[0][1] != sizes.columns:
        raise ValueError(
            f"a_data, b_data: got {tuple(a.data[0])} and {tuple(b.data[0])}; expected (rows, K) "
            "and (N, K)"
        )
    gpu = call.supported(partial(_why_not, sizes, n, call.out_dtype, b.format))
    check_rows("a_scale", a.scale, (sizes.k_blocks, sizes.rows))
    check_scale("b_scale", b.scale, (-(-n // 128), sizes.k_blocks), "compact scales")
    for name, each in (("a_data", a.data), ("a_scale", a.scale)):
        if each[1][0] != each[0][1]:
            raise Unsupported(f"{name}: has strides {each[1]}; its rows must lie together")
    call.check_rest((sizes.whole_rows, n))
    check_loadable(a_data=a.data, b_data=b.data)
    config = choose_gather(sizes, n, call.epilogue(n), gpu=gpu)
    like = template((sizes.whole_rows, n), call.out_dtype, call.device)
    return CompiledGemm(config, gpu.load(config), like, octets, (gpu.multiprocessors,))


def _why_not(
    sizes: GatherSizes, n: int, out_dtype: torch.dtype, b_format: str | None, arch: str
) -> str:
    reason = why_not(sizes.columns, from_torch(out_dtype), b_format, arch)
    if not reason and b_format != "fp8_128x128":
        reason = f"b_format {b_format}: kernels that gather take fp8_128x128"
    if not reason and not n:
        reason = "B has no rows"
    return reason or why_not_gather(sizes)
