"""The op ``dequantize``: the CPU kernel where there is one, else the reference on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..formats import get_format
from ..kernels import cpu
from .backends import no_cpu_kernels

__all__ = ["dequantize"]


@torch.library.custom_op("blockscale::dequantize", mutates_args=())
def dequantize(
    data: Tensor,
    scale: Tensor,
    format: str,
    shape: list[int],
    axis: int,
    global_scale: Tensor | None,
    offsets: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Values of quantized data with compact scales; ``offsets`` cut the contraction."""
    fmt, size = get_format(format), torch.Size(shape)
    if data.device.type == "cpu" and offsets is None and not no_cpu_kernels():
        out = cpu.dequantize(
            data, scale, fmt, shape=size, axis=axis, global_scale=global_scale, dtype=dtype
        )
        return out.contiguous()
    out = reference.dequantize(
        data, scale, fmt, shape=size, axis=axis, global_scale=global_scale, offsets=offsets
    )
    return out.to(dtype).contiguous()


@dequantize.register_fake
def _(
    data: Tensor,
    scale: Tensor,
    format: str,
    shape: list[int],
    axis: int,
    global_scale: Tensor | None,
    offsets: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return data.new_empty(shape, dtype=dtype)
