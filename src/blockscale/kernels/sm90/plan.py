"""What a call of the product needs, found once for all calls alike: its kernel and its checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..common.calls import (
    Alpha,
    aligned_rows,
    check_loadable,
    check_matrix,
    check_rest,
    sum_of_nothing,
)
from ..common.runtime import Described, Unsupported, architecture, get_kernel, missing
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
def plan_gemm(
    a: Described,
    a_scale: Described,
    b: Described,
    b_scale: Described,
    out: Described | None,
    bias: Described | None,
    alpha: tuple[Described, ...],
    out_dtype: torch.dtype,
    b_block: tuple[int, int],
    accumulate: bool,
    device: torch.device,
    arch: str | None,
) -> Plan:
    """The plan of a call of ``gemm``; raises as it does."""
    for name, data in (("a_data", a), ("b_data", b)):
        check_matrix(name, data, _BYTES)
    (m, k), n = a[0], b[0][0]
    if b[0][1] != k:
        raise ValueError(
            f"a_data, b_data: got {(m, k)} and {tuple(b[0])}; expected (M, K) and (N, K)"
        )
    arch = arch or architecture(device.index)
    reason = missing() or why_not(k, out_dtype, b_block, arch)
    if reason:
        raise Unsupported(reason)
    blocks = -(-k // BLOCK_K)
    _check_rows("a_scale", a_scale, (blocks, -(-m // 4) * 4))
    if b_block[0] == 1:
        _check_rows("b_scale", b_scale, (blocks, -(-n // 4) * 4))
    else:
        _check_scale("b_scale", b_scale, (-(-n // b_block[0]), blocks), "compact scales")
    check_rest((m, n), out, bias, alpha, out_dtype, accumulate)
    like = template((m, n), out_dtype, device)
    if 0 in (m, n, k):
        return Plan(None, None, 0, like)
    check_loadable(a_data=a, b_data=b)
    config = choose_config(
        (m, n, k),
        out_dtype,
        b_block=b_block,
        accumulate=accumulate,
        aligned=aligned_rows(n, out, out_dtype),
        bias=None if bias is None else bias[2],
        alpha=len(alpha),
    )
    return Plan(config, get_kernel(config, device), multiprocessors_of(device), like)


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
    if stride[1] != 1 or stride[0] % 4 or address:
        raise ValueError(
            f"{name}: has strides {stride} and starts {address} bytes after a multiple of 16; "
            'expected rows as those of layout "sm90": call contiguous()'
        )


def multiprocessors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS  # there is no device to ask
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
