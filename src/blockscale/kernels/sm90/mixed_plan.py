"""What a call of the product that widens needs, found once for all calls alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ...dtypes import from_torch
from ...formats import get_format
from ..common.calls import CompiledGemm, GemmCall, below_each_other, check_loadable, check_matrix
from ..common.template import template
from .mixed_choice import choose_kernels
from .mixed_config import BF16, BLOCK_K, promotes, why_not
from .plan import below, check_bytes, check_rows, octets

__all__ = ["plan_mixed"]

_BYTES = (
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float4_e2m1fn_x2,
    torch.float8_e8m0fnu,
)


@dataclass(frozen=True, slots=True)
class _Widened:
    """A product of bf16 values of A, which are written first.

    Attributes:
        widen: writes them, as ``multiply`` wants them.
        multiply: the product.
        like: a template of them.
        partials: a template of what ``stream_reduce.StreamReduce`` takes, or None.
        promotes: scales of A go to the product.
        decodes: the product is that of ``skinny``, which takes no partials.
    """

    widen: Callable[..., Any]
    multiply: Callable[..., Any]
    like: Tensor
    partials: Tensor | None
    promotes: bool
    decodes: bool

    def __call__(self, a: Tensor, a_scale: Tensor | None, *rest: Any) -> None:
        values = torch.empty_like(self.like)
        partials = None if self.partials is None else torch.empty_like(self.partials)
        applied, later = (None, a_scale) if self.promotes else (a_scale, None)
        self.widen(a, applied, values, partials)
        self.multiply(values, later, *(() if self.decodes else (partials,)), *rest)


@lru_cache(maxsize=4096)
def plan_mixed(call: GemmCall) -> CompiledGemm:
    """The plan of a call of ``mixed_gemm``, or of one whose rows of A are grouped; raises as it
    does."""
    (a, a_scale, a_format), (b, b_scale, b_format) = call.a, call.b
    assert b_format is not None
    assert b_scale is not None
    groups, views = 1, octets
    if call.offsets is not None:
        groups, views = b[0][0], below
        b, b_scale = below_each_other("b_data", b), below_each_other("b_scale", b_scale)
    gpu = call.supported(partial(why_not, a_format or BF16, b_format, from_torch(call.out_dtype)))
    for name, data in (("a_data", a), ("b_data", b)):
        if len(data[0]) == 2 and data[1][1] != 1 and data[0][1] > 1:
            raise ValueError(
                f"{name}: has strides {data[1]}; its last dimension, K, must lie together: "
                "quantize columns with k_major=True, or call contiguous()"
            )
    check_matrix("a_data", a, (torch.bfloat16,) if a_format is None else _BYTES)
    check_matrix("b_data", b, _BYTES)
    m, n, format = a[0][0], b[0][0] // groups, get_format(b_format)
    k = format.element.elements(b[0][1])
    a_kind = None if a_format is None else get_format(a_format)
    a_k = a[0][1] if a_kind is None else a_kind.element.elements(a[0][1])
    block, a_block = format.block_size, 1 if a_kind is None else a_kind.block_size
    whole = max(block, a_block)  # both are padded to blocks of their own
    if k % block or a_k % a_block or -(-k // whole) != -(-a_k // whole):
        raise ValueError(
            f"a_data, b_data: got {(m, a_k)} and {(n, k)} elements; expected (M, K) and (N, K), "
            f"quantized ones padded to blocks of {a_block} and {block}"
        )
    if (a_format is None) != (a_scale is None):
        raise ValueError("a_scale: belongs to quantized data, bf16 data has None")
    check_bytes("b_scale", b_scale, (groups * n, k // block), format)
    promoted = a_scale is not None and promotes(a_format or BF16)
    if promoted:
        check_rows("a_scale", a_scale, (a_k // a_block, -(-m // 4) * 4))
    elif a_scale is not None:
        check_bytes("a_scale", a_scale, (m, k // block), format)
    call.check_rest((m, n))
    like = template((m, n), call.out_dtype, call.device)
    if 0 in (m, n, k):
        return CompiledGemm(None, None, like, views)
    check_loadable(a_data=a, b_data=b)
    chosen = choose_kernels(
        (m, n, k),
        (a_format, b_format),
        call.epilogue(n),
        scales_apart=math.gcd(b_scale[1][0], b_scale[3], 16),
        groups=groups if call.offsets is not None else 0,
        grouping=call.grouping,
        gpu=gpu,
    )
    run = gpu.load(chosen.multiply)
    if chosen.widen is not None:
        values = template((m, -(-k // BLOCK_K) * BLOCK_K), torch.bfloat16, call.device)
        words = (chosen.partials,)
        partials = template(words, torch.int32, call.device) if chosen.partials else None
        widen = gpu.load(chosen.widen)
        run = _Widened(widen, run, values, partials, chosen.promotes, chosen.decodes)
    rest = chosen.rest(gpu.multiprocessors)
    return CompiledGemm(chosen.multiply, run, like, views, rest)
