"""Other libraries' products of groups of rows. ``x`` (M, K) and ``w`` (groups, N, K) are bf16;
``sizes`` are rows of each group, all of M. Results are bf16 (M, N).

Each function makes what is needed and returns the call to time; it raises, or the call does, where
the library is missing or has nothing for this GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..quantize import quantize
from .contest import Call

__all__ = ["bf16", "deep_gemm", "ends_of", "row_wise"]

_FP8 = torch.float8_e4m3fn
_ALIGNED = 128  # rows that DeepGEMM wants groups to be multiples of


def ends_of(sizes: Sequence[int], device: torch.device) -> Tensor:
    """The end of each group's rows, as ``grouped_gemm`` takes it."""
    return torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=device)


def bf16(x: Tensor, w: Tensor, sizes: Sequence[int]) -> Call:
    ends, product = ends_of(sizes, x.device), _torchs("_grouped_mm")
    return lambda: product(x, w.mT, offs=ends)


def row_wise(x: Tensor, w: Tensor, sizes: Sequence[int]) -> Call:
    """torch's FP8 with a scale for each row of both, which is less exact."""
    ends, product = ends_of(sizes, x.device), _torchs("_scaled_grouped_mm")
    (a, a_scale), (b, b_scale) = _rows(x), _rows(w)
    options = {"offs": ends, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    return lambda: product(a, b.mT, a_scale, b_scale, **options)


def deep_gemm(x: Tensor, w: Tensor, sizes: Sequence[int]) -> Call:
    """1x128 x 128x128."""
    library: Any = import_module("deep_gemm")
    if any(size % _ALIGNED for size in sizes):
        raise ValueError(f"sizes are no multiples of {_ALIGNED}")
    owners = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    owner = owners.to(x.device, torch.int32)
    q = quantize(x, "fp8_1x128", layout="sm90", backend="kernel")
    a = q.qdata, q.scale[:, : x.shape[0]].mT
    weights = [quantize(each, "fp8_128x128", backend="kernel") for each in w]
    b = torch.stack([each.qdata for each in weights]), torch.stack([q.scale for q in weights])
    d = torch.empty(x.shape[0], w.shape[1], dtype=torch.bfloat16, device=x.device)
    return lambda: library.m_grouped_fp8_gemm_nt_contiguous(a, b, d, owner)


def _torchs(name: str) -> Any:
    found = getattr(torch, name, None)
    if found is None:
        raise ValueError(f"torch {torch.__version__} has no {name}")
    return found


def _rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 and a scale for each row."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scale).to(_FP8), scale.squeeze(-1)
