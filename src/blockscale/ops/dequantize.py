"""The op ``dequantize``: a kernel where there is one, else the reference on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..apart import apart_position
from ..formats import Format, get_format, padded_groups
from ..kernels.common.gpu import Unsupported
from ..kernels.common.runtime import gpu_of
from ..kernels.cpu import calls as cpu
from ..kernels.quantizers import calls as quantizers
from ..stored import is_per_group, is_per_matrix
from .backends import fall_back, no_cpu_kernels
from .gemm_operands import Side, scale_matrix
from .operation import operation

__all__ = ["dequantize", "fp32_of", "values"]


def _fake(data: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    return data.new_empty(shape, dtype=dtype)


@operation(_fake)
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
    if is_per_matrix(global_scale, size):
        one = torch.ones((), device=data.device)  # and they are multiplied by their own then
        values = dequantize(data, scale, format, shape, axis, one, offsets, torch.float32)
        return values.mul_(global_scale[..., None, None]).to(dtype)
    if offsets is not None:
        wide = list(shape)
        wide[axis] = padded_groups(shape[axis], len(offsets))
        if fmt.element.elements(data.shape[axis]) == wide[axis]:  # whole groups, moved apart
            apart = dequantize(data, scale, format, wide, axis, global_scale, None, dtype)
            return _together(apart, shape[axis], axis, offsets)
    if data.device.type == "cpu" and offsets is None and not no_cpu_kernels():
        out = cpu.dequantize(
            data, scale, fmt, shape=size, axis=axis, global_scale=global_scale, dtype=dtype
        )
        return out.contiguous()
    if gpu_of(data.device) is not None:
        try:
            return _by_kernel(data, scale, fmt, shape, axis, global_scale, offsets, dtype)
        except Unsupported as why:
            fall_back("dequantize", data, "auto", str(why))
    out = reference.dequantize(
        data, scale, fmt, shape=size, axis=axis, global_scale=global_scale, offsets=offsets
    )
    return out.to(dtype).contiguous()


def _together(apart: Tensor, k: int, axis: int, offsets: Tensor) -> Tensor:
    """Values of groups that were moved apart along ``axis``; zeros past the last one."""
    out = apart.index_select(axis, apart_position(offsets, k))
    inside = torch.arange(k, device=out.device) < offsets[-1]
    return torch.where(inside if axis == -1 else inside[:, None], out, 0)


def values(side: Side, axis: int) -> Tensor:
    """What an operand of a product stands for; fp32, or what it is."""
    if side.format is None:
        return side.data
    scale, shape = scale_matrix(side, axis), list(side.shape)
    if axis == -1:
        return fp32_of(side, side.data, scale, shape, -1)
    if side.data.mT.is_contiguous():  # a weight (N, K): neither bytes nor values are turned
        return fp32_of(side, side.data.mT, scale, shape[::-1], -1).mT
    return fp32_of(side, side.data, scale.mT, shape, -2)


def fp32_of(
    side: Side,
    data: Tensor,
    scale: Tensor,
    shape: list[int],
    axis: int,
    offsets: Tensor | None = None,
) -> Tensor:
    """Values of a quantized operand, of data and compact scales that lie so."""
    assert side.format is not None
    scalar, groups = side.global_scale, 0
    if is_per_group(scalar) and len(shape) == 2:  # of equal groups of rows
        groups = len(scalar)
        shape = [groups, shape[0] // max(groups, 1), shape[1]]
        data, scale = (x.unflatten(0, shape[:2]) for x in (data, scale))
    values = dequantize(data, scale, side.format, shape, axis, scalar, offsets, torch.float32)
    return values.flatten(0, 1) if groups else values


def _by_kernel(
    data: Tensor,
    scale: Tensor,
    fmt: Format,
    shape: list[int],
    axis: int,
    global_scale: Tensor | None,
    offsets: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """What the GPU kernel makes of it; Unsupported where there is none."""
    if offsets is not None:
        raise Unsupported(
            "offsets: kernels dequantize groups along the contraction that are moved apart: "
            "quantize with k_major=True"
        )
    made = torch.float32 if dtype == torch.float64 else dtype  # exact
    stored = quantizers.Stored(fmt.name, tuple(shape), axis)
    out = quantizers.dequantize(data, scale, stored, global_scale=global_scale, dtype=made)
    return out.to(dtype).contiguous()
