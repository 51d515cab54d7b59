"""RMSNorm and LayerNorm bit for bit, and their gradients.

Forward, inputs are widened to fp32 and every step is one IEEE fp32 operation in the order written
here; sums are balanced binary trees. Gradients are formulas in fp32 whose sums are torch's: their
order is each processor's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rounding import FP32_NAN, from_float32_bits
from .fused import square_root, sum_of_pairs

__all__ = ["layernorm", "layernorm_backward", "rmsnorm", "rmsnorm_backward"]


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x`` (..., K) over the root mean square of its rows, times ``weight`` (K,).

    Squares are summed pairwise: neighbours first, then sums of two, of four and so on, over a row
    padded with zeros to a power of two. ``eps`` is rounded to fp32. Returns the result, like ``x``,
    and ``rstd`` (...,) in fp32, what the rows were multiplied with.
    """
    wide = x.to(torch.float32)
    rstd = _rstd(wide, eps)
    y = (wide * rstd.unsqueeze(-1)) * weight.to(torch.float32)
    return y.to(x.dtype), rstd


def layernorm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` (..., K) less the mean of its rows, over their standard deviation, times ``weight``
    (K,), plus ``bias`` (K,).

    The mean is summed as the squares of :func:`rmsnorm` are; what differs from it, rounded, is what
    is squared and multiplied. Returns the result, like ``x``, mean and ``rstd`` (...,) in fp32.
    """
    wide = x.to(torch.float32)
    mean = _canonical(_mean(wide))
    centered = wide - mean.unsqueeze(-1)
    rstd = _rstd(centered, eps)
    y = (centered * rstd.unsqueeze(-1)) * weight.to(torch.float32)
    y = y if bias is None else y + bias.to(torch.float32)
    return y.to(x.dtype), mean, rstd


def rmsnorm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``x`` and of ``weight``, like these, from ``grad`` of ``rmsnorm``."""
    grad, rstd = grad.to(torch.float32), rstd.unsqueeze(-1)
    normalized = x.to(torch.float32) * rstd
    of_normalized = grad * weight.to(torch.float32)
    shared = (of_normalized * normalized).mean(-1, keepdim=True)
    of_x = (of_normalized - normalized * shared) * rstd
    return of_x.to(x.dtype), _sum_of_rows(grad * normalized).to(weight.dtype)


def layernorm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``x``, of ``weight`` and, in fp32, of a bias, from ``grad`` of ``layernorm``."""
    grad, rstd = grad.to(torch.float32), rstd.unsqueeze(-1)
    normalized = (x.to(torch.float32) - mean.unsqueeze(-1)) * rstd
    of_normalized = grad * weight.to(torch.float32)
    shared = (of_normalized * normalized).mean(-1, keepdim=True)
    of_x = (of_normalized - of_normalized.mean(-1, keepdim=True) - normalized * shared) * rstd
    of_weight = _sum_of_rows(grad * normalized).to(weight.dtype)
    return of_x.to(x.dtype), of_weight, _sum_of_rows(grad)


def _mean(x: Tensor) -> Tensor:
    """Of each row of fp32, as a tree of sums."""
    k = x.shape[-1]
    total = sum_of_pairs(torch.nn.functional.pad(x, (0, (1 << (k - 1).bit_length()) - k)))
    return total / torch.full_like(total, k)


def _rstd(x: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(x**2) + eps)`` of each row of fp32."""
    mean = _mean(x * x)
    return _canonical(torch.ones_like(mean) / square_root(mean + torch.full_like(mean, eps)))


def _canonical(x: Tensor) -> Tensor:
    """The same with one NaN."""
    nan = from_float32_bits(torch.full_like(x, FP32_NAN, dtype=torch.int64))
    return torch.where(x.isnan(), nan, x)


def _sum_of_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).sum(0)
