"""What a call of the product needs, found once for all calls alike: its kernel and its checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..gpu.plan import Described, Unsupported, architecture, get_kernel
from .config import BLOCK_K, Config, choose_config, why_not

__all__ = ["Plan", "plan_gemm"]

_BYTES = (torch.uint8, torch.float8_e4m3fn)
_EMULATED = 132  # multiprocessors, where there is no device to ask


@dataclass(frozen=True, slots=True)
class Plan:
    """``run`` takes data as bytes, scales, the output, and how many multiprocessors there are; None
    where nothing is to do. ``out`` is one item, expanded to the output's shape: empty_like of it is
    the fastest way to allocate.
    """

    config: Config | None
    run: Callable[..., Any] | None
    multiprocessors: int
    out: Tensor


@lru_cache(maxsize=4096)
def plan_gemm(
    a: Described,
    a_scale: Described,
    b: Described,
    b_scale: Described,
    out: Described | None,
    out_dtype: torch.dtype,
    b_block: tuple[int, int],
    accumulate: bool,
    device: torch.device,
    arch: str | None,
) -> Plan:
    """The plan of a call of ``gemm``; raises as it does."""
    for name, data in (("a_data", a), ("b_data", b)):
        _check_matrix(name, data, _BYTES)
    (m, k), n = a[0], b[0][0]
    if b[0][1] != k:
        raise ValueError(
            f"a_data, b_data: got {(m, k)} and {tuple(b[0])}; expected (M, K) and (N, K)"
        )
    arch = arch or architecture(device.index)
    reason = why_not(k, out_dtype, accumulate, b_block, arch)
    if reason:
        raise Unsupported(reason)
    blocks = -(-k // BLOCK_K)
    _check_scale("a_scale", a_scale, (blocks, -(-m // 4) * 4), spaced=True)
    along_rows = b_block[0] == 1
    padded = (blocks, -(-n // 4) * 4)
    wanted = padded if along_rows else (-(-n // b_block[0]), blocks)
    _check_scale("b_scale", b_scale, wanted, spaced=along_rows)
    if accumulate and out is None:
        raise ValueError("accumulate: needs c, the tensor to add to")
    if out is not None:
        _check_matrix("c", out, (out_dtype,))
        if tuple(out[0]) != (m, n):
            raise ValueError(f"c: has shape {tuple(out[0])}; the product is {(m, n)}")
    like = torch.empty(1, dtype=out_dtype, device=device).expand(m, n)
    if 0 in (m, n, k):
        return Plan(None, None, 0, like)
    for name, data in (("a_data", a), ("b_data", b)):
        if data[3] or data[1][0] % 16:
            raise Unsupported(f"{name}: TMA wants rows that start at a multiple of 16 bytes")
    apart, address = (n, 0) if out is None else (out[1][0], out[3])
    aligned = address == 0 and apart * out_dtype.itemsize % 16 == 0
    config = choose_config(
        (m, n, k), out_dtype, b_block=b_block, accumulate=accumulate, aligned=aligned
    )
    return Plan(config, get_kernel(config, device), _multiprocessors(device), like)


def _check_matrix(name: str, x: Described, dtypes: tuple[torch.dtype, ...]) -> None:
    shape, stride, dtype, _ = x
    if dtype not in dtypes:
        raise TypeError(f"{name}: got {dtype}; expected {' or '.join(map(str, dtypes))}")
    if len(shape) != 2:
        raise ValueError(f"{name}: has shape {tuple(shape)}; expected a matrix")
    if stride[1] != 1 and shape[1] > 1:
        raise ValueError(
            f"{name}: has strides {stride}; its last dimension must lie together: call contiguous()"
        )


def _check_scale(name: str, x: Described, wanted: tuple[int, int], *, spaced: bool) -> None:
    shape, stride, dtype, address = x
    if dtype != torch.float32:
        raise TypeError(f"{name}: got {dtype}; expected torch.float32")
    if tuple(shape) != wanted:
        kind = 'layout "sm90"' if spaced else "compact scales"
        raise ValueError(f"{name}: has shape {tuple(shape)}; expected {wanted}, {kind}")
    if 0 in wanted:
        return
    if (stride[1] != 1 and shape[1] > 1) or (spaced and (address or stride[0] % 4)):
        raise ValueError(
            f"{name}: has strides {stride} and starts {address} bytes after a multiple of 16; "
            'expected rows as those of layout "sm90": call contiguous()'
        )


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _EMULATED
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
