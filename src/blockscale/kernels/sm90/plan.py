"""What a call of the product needs, found once for all calls alike: its kernel and its checks."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor

from ...dtypes import from_torch
from ...formats import Format, get_format
from ...memory import as_bytes
from ..common.calls import CompiledGemm, GemmCall, check_loadable, check_matrix
from ..common.runtime import Described, beside_collectives
from ..common.template import template
from .config import BLOCK_K, choose_config, why_not

__all__ = [
    "BYTES",
    "below",
    "check_bytes",
    "check_rows",
    "check_scale",
    "octets",
    "plan_gemm",
]

BYTES = (torch.uint8, torch.float8_e4m3fn)


def octets(*operands: Tensor | None) -> tuple[Tensor | None, ...]:
    """What has items of a byte, as bytes."""
    return tuple(None if x is None else as_bytes(x) for x in operands)


def below(*operands: Tensor | None) -> tuple[Tensor | None, ...]:
    """Matrices of all groups below each other."""
    return octets(*(x.flatten(0, 1) if x is not None and x.dim() == 3 else x for x in operands))


def plan_gemm(call: GemmCall) -> CompiledGemm:
    """The plan of a call of ``gemm``; raises as it does."""
    return _plan(call, beside_collectives())


@lru_cache(maxsize=4096)
def _plan(call: GemmCall, shares_gpu: bool) -> CompiledGemm:
    a, b, m, n = call.a, call.b, call.a.data[0][0], call.b.data[0][0]
    for name, each in (("a_data", a), ("b_data", b)):
        check_matrix(name, each.data, BYTES)
    k = a.data[0][1]
    if b.data[0][1] != k:
        raise ValueError(
            f"a_data, b_data: got {(m, k)} and {tuple(b.data[0])}; expected (M, K) and (N, K)"
        )
    gpu = call.supported(partial(why_not, k, from_torch(call.out_dtype), b.format))
    block, blocks = get_format(b.format).block, -(-k // BLOCK_K)
    check_rows("a_scale", a.scale, (blocks, -(-m // 4) * 4))
    if block[0] == 1:
        check_rows("b_scale", b.scale, (blocks, -(-n // 4) * 4))
    else:
        check_scale("b_scale", b.scale, (-(-n // block[0]), blocks), "compact scales")
    call.check_rest((m, n))
    like = template((m, n), call.out_dtype, call.device)
    if 0 in (m, n, k):
        return CompiledGemm(None, None, like, octets)
    check_loadable(a_data=a.data, b_data=b.data)
    config = choose_config((m, n, k), call.epilogue(n), b_block=block, gpu=gpu)
    ctas = config.shared_ctas(m, n, gpu) if shares_gpu else gpu.multiprocessors
    return CompiledGemm(config, gpu.load(config), like, octets, (None, None, ctas))


def check_scale(name: str, x: Described, wanted: tuple[int, ...], kind: str) -> None:
    """Raise unless ``x`` is fp32 of the shape ``wanted``, which a ``kind`` of scales has."""
    if x[2] != torch.float32:
        raise TypeError(f"{name}: got {x[2]}; expected torch.float32")
    if tuple(x[0]) != wanted:
        raise ValueError(f"{name}: has shape {tuple(x[0])}; expected {wanted}, {kind}")


def check_rows(name: str, x: Described, wanted: tuple[int, int]) -> None:
    """The same of scales that are loaded by TMA."""
    check_scale(name, x, wanted, 'layout "sm90"')
    stride, address = x[1], x[3]
    if 0 in wanted:
        return
    if stride[1] != 1 or stride[0] % 4 or address % 16:
        raise ValueError(
            f"{name}: has strides {stride} and starts {address % 16} bytes after a multiple of 16; "
            'expected rows as those of layout "sm90": call contiguous()'
        )


def check_bytes(name: str, x: Described, wanted: tuple[int, int], format: Format) -> None:
    """The same of compact scales of a byte."""
    if x[2].itemsize != 1:
        raise TypeError(f"{name}: got {x[2]}; expected bytes of {format.scale.name}")
    if tuple(x[0]) != wanted:
        raise ValueError(f"{name}: has shape {tuple(x[0])}; expected {wanted}, compact scales")
    if x[1][1] != 1 and wanted[1] > 1:
        raise ValueError(
            f"{name}: has strides {x[1]}; its last dimension must lie together: call contiguous()"
        )
