"""What a call of a product of groups needs, of FP8: its kernel and its checks."""

from __future__ import annotations

from functools import lru_cache, partial

from torch import Tensor

from ...dtypes import from_torch
from ..common.calls import (
    CompiledGemm,
    GemmCall,
    below_each_other,
    check_apart,
    check_loadable,
    check_matrix,
)
from ..common.gpu import Unsupported
from ..common.groupings import square
from ..common.template import template
from .config import BLOCK_K, why_not
from .grouped_config import choose_grouped, k_grouped_candidates, supergroup
from .plan import BYTES, check_rows, check_scale, octets

__all__ = ["plan_grouped", "plan_k_grouped"]


@lru_cache(maxsize=4096)
def plan_grouped(call: GemmCall) -> CompiledGemm:
    """The plan of a call of ``grouped_gemm``, of rows of fp8_1x128 by fp8_128x128; raises as it
    does."""
    a, b = call.a, call.b
    check_matrix("a_data", a.data, BYTES)
    (m, k), (groups, n, _) = a.data[0], b.data[0]
    if b.data[2] not in BYTES or b.data[0][2] != k:
        raise ValueError(
            f"a_data, b_data: got {(m, k)} and {tuple(b.data[0])} of {b.data[2]}; expected bytes "
            "(M, K) and (groups, N, K)"
        )
    gpu = call.supported(partial(why_not, k, from_torch(call.out_dtype), b.format))
    if b.format != "fp8_128x128":
        raise Unsupported(f"b_format {b.format}: grouped, there are kernels for fp8_128x128")
    blocks = -(-k // BLOCK_K)
    check_rows("a_scale", a.scale, (blocks, -(-m // 4) * 4))
    check_scale("b_scale", b.scale, (groups, -(-n // 128), blocks), "compact scales")
    call.check_rest((m, n))
    like = template((m, n), call.out_dtype, call.device)
    if 0 in (m, n, k):
        return CompiledGemm(None, None, like, _views)
    check_loadable(a_data=a.data, b_data=below_each_other("b_data", b.data))
    config = choose_grouped((m, n, k), groups, call.epilogue(n), grouping=call.grouping, gpu=gpu)
    rest = supergroup(config.tile, k, gpu.multiprocessors), gpu.multiprocessors
    return CompiledGemm(config, gpu.load(config), like, _views, rest)


@lru_cache(maxsize=4096)
def plan_k_grouped(call: GemmCall) -> CompiledGemm:
    """The plan of a call of ``grouped_gemm``, of columns of fp8_1x128; raises as it does."""
    a, b, groups = call.a, call.b, call.offsets[0][0] if call.offsets else 0
    for name, each in (("a_data", a), ("b_data", b)):
        check_matrix(name, each.data, BYTES)
    (m, k), n = a.data[0], b.data[0][0]
    if b.data[0][1] != k:
        raise ValueError(
            f"a_data, b_data: got {(m, k)} and {tuple(b.data[0])}; expected (M, K) and (N, K)"
        )
    check_apart(k, groups)
    gpu = call.supported(partial(why_not, k, from_torch(call.out_dtype), b.format))
    if b.format != a.format or b.format != "fp8_1x128":
        raise Unsupported(f"formats {a.format}, {b.format}: there are kernels for fp8_1x128")
    blocks = k // BLOCK_K
    check_rows("a_scale", a.scale, (blocks, -(-m // 4) * 4))
    check_rows("b_scale", b.scale, (blocks, -(-n // 4) * 4))
    call.check_rest((groups * m, n))
    like = template((groups * m, n), call.out_dtype, call.device)
    if 0 in (groups, m, n, k):
        return CompiledGemm(None, None, like, octets)
    check_loadable(a_data=a.data, b_data=b.data)
    config = k_grouped_candidates((m, n, k), groups, call.epilogue(n), gpu)[0]
    rest = square(config.tile, gpu.multiprocessors), gpu.multiprocessors
    return CompiledGemm(config, gpu.load(config), like, octets, rest)


def _views(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> tuple[Tensor | None, ...]:
    """Matrices of all groups below each other."""
    return octets(a, a_scale, b.flatten(0, 1), b_scale)
