"""What a call of the product needs, found once for all calls alike: its kernel and its checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...formats import get_format
from ..common.calls import (
    Alpha,
    GemmCall,
    check_loadable,
    check_matrix,
    sum_of_nothing,
)
from ..common.runtime import Described, Unsupported, get_kernel, missing
from ..common.template import template
from .config import BLOCK_K, choose_config, why_not
from .product_config import MULTIPROCESSORS

__all__ = ["Plan", "multiprocessors_of", "plan_gemm"]

_BYTES = (torch.uint8, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class Plan:
    """``run`` takes data as bytes, scales, the output, bias, alpha, and how many multiprocessors
    there are; None where nothing is to be multiplied. ``config`` is its kernel's. ``out`` is
    the output's template.
    """

    config: Any
    run: Callable[..., Any] | None
    multiprocessors: int
    out: Tensor

    def product(
        self,
        operands: tuple[Tensor | None, ...],
        c: Tensor | None,
        bias: Tensor | None,
        alpha: Alpha,
        accumulate: bool,
    ) -> Tensor:
        """Of data and scales as ``run`` takes them, in ``c`` or in new memory."""
        out = torch.empty_like(self.out) if c is None else c
        if self.run is None:
            return sum_of_nothing(out, bias, accumulate)
        self.run(*operands, out, bias, alpha, self.multiprocessors)
        return out


@lru_cache(maxsize=4096)
def plan_gemm(call: GemmCall) -> Plan:
    """The plan of a call of ``gemm``; raises as it does."""
    a, b, m, n = call.a, call.b, call.a.data[0][0], call.b.data[0][0]
    for name, each in (("a_data", a), ("b_data", b)):
        check_matrix(name, each.data, _BYTES)
    k = a.data[0][1]
    if b.data[0][1] != k:
        raise ValueError(
            f"a_data, b_data: got {(m, k)} and {tuple(b.data[0])}; expected (M, K) and (N, K)"
        )
    reason = missing() or why_not(k, call.out_dtype, b.format, call.target)
    if reason:
        raise Unsupported(reason)
    block, blocks = get_format(b.format).block, -(-k // BLOCK_K)
    _check_rows("a_scale", a.scale, (blocks, -(-m // 4) * 4))
    if block[0] == 1:
        _check_rows("b_scale", b.scale, (blocks, -(-n // 4) * 4))
    else:
        _check_scale("b_scale", b.scale, (-(-n // block[0]), blocks), "compact scales")
    call.check_rest((m, n))
    like = template((m, n), call.out_dtype, call.device)
    if 0 in (m, n, k):
        return Plan(None, None, 0, like)
    check_loadable(a_data=a.data, b_data=b.data)
    config = choose_config(
        (m, n, k),
        call.out_dtype,
        b_block=block,
        aligned=call.aligned_rows(n),
        **call.epilogue,
    )
    return Plan(config, get_kernel(config, call.device), multiprocessors_of(call.device), like)


def _check_scale(name: str, x: Described, wanted: tuple[int, int], kind: str) -> None:
    if x[2] != torch.float32:
        raise TypeError(f"{name}: got {x[2]}; expected torch.float32")
    if tuple(x[0]) != wanted:
        raise ValueError(f"{name}: has shape {tuple(x[0])}; expected {wanted}, {kind}")


def _check_rows(name: str, x: Described, wanted: tuple[int, int]) -> None:
    """Of scales that are loaded by TMA."""
    _check_scale(name, x, wanted, 'layout "sm90"')
    stride, address = x[1], x[3]
    if 0 in wanted:
        return
    if stride[1] != 1 or stride[0] % 4 or address % 16:
        raise ValueError(
            f"{name}: has strides {stride} and starts {address % 16} bytes after a multiple of 16; "
            'expected rows as those of layout "sm90": call contiguous()'
        )


def multiprocessors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS  # there is no device to ask
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
