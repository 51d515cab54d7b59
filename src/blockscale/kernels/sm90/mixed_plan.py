"""What a call of the product that widens needs, found once for all calls alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ...dtypes import from_torch
from ...formats import get_format
from ..common.calls import CompiledGemm, GemmCall, below_each_other, check_loadable, check_matrix
from ..common.runtime import Described
from ..common.template import template
from . import skinny_config
from .mixed_config import (
    BF16,
    BLOCK_K,
    SUPERGROUP,
    choose_config,
    choose_grouped,
    promotes,
    why_not,
)
from .permute_config import PermuteConfig
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
    decodes = (
        call.offsets is None
        and m <= skinny_config.MAX_SKINNY_M
        and not promoted
        and (a_format is None or skinny_config.fills_gpu(n, gpu.multiprocessors))
    )
    if decodes:
        config: Any = skinny_config.choose_config(
            m,
            n,
            k,
            b_format,
            call.epilogue(n),
            tma_scales=_apart(b_scale, skinny_config.SCALE_ROW),
            gpu=gpu,
        )
    else:
        choose = choose_config
        if call.offsets is not None:
            choose = partial(choose_grouped, groups=groups, grouping=call.grouping)
        config = choose(
            shape=(m, n, k),
            b_format=b_format,
            epilogue=call.epilogue(n),
            async_scales=k % BLOCK_K == 0 and _apart(b_scale, BLOCK_K // format.block_size),
            promotes=promoted,
            gpu=gpu,
        )
    run = gpu.load(config)
    if a_format is not None or not decodes:
        values = template((m, -(-k // BLOCK_K) * BLOCK_K), torch.bfloat16, call.device)
        words = 0 if decodes else config.partials(gpu.multiprocessors)
        partials = template((words,), torch.int32, call.device) if words else None
        block_k = 0 if decodes else config.block_k
        widen = gpu.load(PermuteConfig(a_format or BF16, block_k, clears=words > 0))
        run = _Widened(widen, run, values, partials, promoted, decodes)
    rest: tuple[Any, ...] = (gpu.multiprocessors,)
    if call.offsets is not None:
        rest = (SUPERGROUP, *rest)
    elif not decodes:
        rest = (None, None, *rest)
    return CompiledGemm(config, run, like, views, rest)


def _apart(x: Described, nbytes: int) -> bool:
    """Whether rows of bytes start at multiples of so many."""
    return not (x[1][0] % nbytes or x[3] % nbytes)
