"""What quantization did to a tensor, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..error_sums import BINS, SLACK, ErrorSums
from ..formats import Format
from ..rounding import decode_scale
from .quantize import dequantize

__all__ = ["amax", "error_sums"]


def amax(x: Tensor) -> Tensor:
    """The largest finite magnitude of ``x``, fp32; 0 where there is none."""
    finite = x.float().abs().nan_to_num(nan=0.0, posinf=0.0)
    return finite.amax() if x.numel() else torch.zeros((), device=x.device)


def error_sums(
    x: Tensor, data: Tensor, scale: Tensor, format: Format, global_scale: Tensor | None
) -> ErrorSums:
    """Compare ``x`` (..., M, K) with data and compact scales along its last dimension."""
    values = dequantize(data, scale, format, shape=x.shape, axis=-1, global_scale=global_scale)
    finite = x.isfinite() & values.isfinite()
    exact, values = (torch.where(finite, t.float(), 0) for t in (x, values))
    error, magnitude = (values - exact).abs(), exact.abs()
    ratio = torch.where(magnitude > 0, error / magnitude, 0)
    bad = x.numel() - int(finite.sum())
    bins = torch.bincount(ratio.view(torch.int32).flatten() >> 22, minlength=BINS).tolist()
    bins[0] -= bad
    zeros = int((values == 0).sum()) - bad
    limit = _limit(scale, format, global_scale, x.shape)
    return ErrorSums(
        elements=x.numel() - bad,
        signal=float(exact.double().square().sum()),
        noise=float(error.double().square().sum()),
        max_abs=float(error.max()),
        max_rel=float(ratio.max()),
        zeros=zeros,
        flushed=zeros - (int((magnitude == 0).sum()) - bad),
        saturated=int((magnitude > limit).sum()),
        nonfinite=bad,
        bins=tuple(bins),
    )


def _limit(scale: Tensor, format: Format, global_scale: Tensor | None, shape: torch.Size) -> Tensor:
    """``element.max * scale`` for each element."""
    scales = decode_scale(scale, format.scale)
    if global_scale is not None:
        scales = scales * global_scale
    limit = scales * (format.element.max * SLACK)
    for axis, size in zip((-2, -1), format.block, strict=True):
        if len(shape) >= -axis:
            limit = limit.repeat_interleave(size, axis).narrow(axis, 0, shape[axis])
    return limit
