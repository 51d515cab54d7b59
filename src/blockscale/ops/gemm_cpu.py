"""Products on a CPU: a few rows by one compiled loop; more by the processor's bfloat16 where that
is exact, else by torch, of what a loop dequantizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference
from ..kernels.cpu import calls as cpu
from ..stored import is_per_group
from .backends import require_cpu_kernels
from .dequantize import values
from .gemm_operands import Side, scale_matrix

__all__ = ["multiply", "multiply_groups"]


def multiply(
    a: Side,
    b: Side,
    bias: Tensor | None,
    out: Tensor | None,
    accumulate: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """``a @ b + bias``, in ``out`` if that is given; Unsupported where numba is not installed."""
    require_cpu_kernels()
    weight = b.data.mT
    if 0 < a.shape[0] <= cpu.MAX_SKINNY_M and weight.is_contiguous():
        scale = scale_matrix(b, -2)
        acc = cpu.multiply(values(a, -1), weight, scale, b.kind, global_scale=b.global_scale)
    else:
        plain = bias is None and not accumulate and out_dtype in (torch.float32, torch.bfloat16)
        product = _as_bf16(a, b, out_dtype if plain else torch.float32)
        if product is not None and plain:
            return product if out is None else out.copy_(product)
        acc = reference.gemm(values(a, -1), values(b, -2)) if product is None else product
    product = reference.epilogue(acc, out_dtype, bias, out if accumulate else None)
    return product if out is None else out.copy_(product)


def _as_bf16(a: Side, b: Side, dtype: torch.dtype) -> Tensor | None:
    """``a @ b`` by the processor's bfloat16, rounded once to ``dtype``; None where that is not
    exact, or there is no such instruction."""
    from ..kernels.cpu import bf16  # imports numba

    sides = a, b
    if not bf16.available() or any(side.format is None for side in sides):
        return None
    if any(is_per_group(x.global_scale) or not bf16.is_exact(x.kind) for x in sides):
        return None
    left = bf16.pair(a.data, scale_matrix(a, -1), a.kind, a.shape[-1], left=True)
    if left is None:
        return None
    right = bf16.pair(b.data.mT, scale_matrix(b, -2), b.kind, b.shape[-2], left=False)
    if right is None:
        return None
    return bf16.multiply(left, right, a.global_scale, b.global_scale, dtype)


def multiply_groups(
    a: Side, b: Side, bounds: Sequence[tuple[int, int]], out_dtype: torch.dtype
) -> Tensor:
    """Rows of ``a`` (M, K) between the ``bounds[i]`` by ``b[i]`` (K, N), each group with the bits
    of a product of its own; other rows are zero."""
    n = b.shape[-1]
    out = torch.zeros(a.shape[0], n, dtype=out_dtype)
    assert b.scale is not None
    scalars: Sequence[Tensor | None] = [b.global_scale] * len(bounds)
    if is_per_group(b.global_scale):
        scalars = b.global_scale.unbind()
    for data, scale, scalar, (start, end) in zip(b.data, b.scale, scalars, bounds, strict=True):
        if start < end:
            expert = b._replace(data=data, scale=scale, global_scale=scalar, shape=b.shape[-2:])
            multiply(_rows(a, start, end), expert, None, out[start:end], False, out_dtype)
    return out


def _rows(a: Side, start: int, end: int) -> Side:
    """Some rows, with the one global scale that they have; plain where they have several, and where
    they may cut blocks."""
    scalar, shape = a.global_scale, (end - start, a.shape[-1])
    if a.format is not None and a.kind.block[0] > 1:
        return Side(values(a, -1)[start:end], None, None, None, "compact", shape)
    if is_per_group(scalar):
        size = a.shape[0] // len(scalar)
        if start // size != (end - 1) // size:
            return Side(values(a, -1)[start:end], None, None, None, "compact", shape)
        scalar = scalar[start // size]
    scale = None if a.scale is None else scale_matrix(a, -1)[start:end]
    return Side(a.data[start:end], scale, scalar, a.format, "compact", shape)
