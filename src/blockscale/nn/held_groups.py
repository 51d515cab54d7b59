"""Products of rows in groups by stacks of matrices that are held quantized."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from .. import ops
from ..gemm import grouped_gemm
from ..memory import as_bytes
from ..ops.backends import fall_back
from ..tensor import ScaledTensor
from .quantized import transposed_weight

__all__ = ["Held", "is_held", "product"]

#: A stack (groups, N, K), or (groups, K, N); or two, whose rows lie below each other in each group.
Held = ScaledTensor | tuple[ScaledTensor, ScaledTensor]


def is_held(weight: object) -> TypeGuard[Held]:
    """Whether a stack, or the first of two, is quantized already."""
    return isinstance(weight[0] if isinstance(weight, tuple) else weight, ScaledTensor)


def product(
    x: Tensor, weight: Held, offsets: Tensor, dtype: torch.dtype, *, upright: bool
) -> Tensor:
    """``x[start:end] @ weight[i]`` of each group, or, unless the stack is ``upright``, by the
    transposes.

    ``x`` is quantized by rows, or plain, and then multiplied by the exact values. Kernels do that
    for bf16 along the blocks of the stack; other types, and the gradient of ``x``, have a matrix
    dequantized after the other.
    """
    if isinstance(weight, tuple):
        return _of_two(x, weight, offsets, dtype, upright)
    if not x.shape[0]:  # no group's ends need be known
        return x.new_zeros(0, weight.shape[-1 if upright else -2], dtype=dtype)
    along_blocks = weight.axis == (-2 if upright else -1)
    if isinstance(x, ScaledTensor) or (along_blocks and x.dtype == torch.bfloat16):
        return grouped_gemm(x, weight if upright else transposed_weight(weight), offsets, dtype)
    if along_blocks and not torch.compiler.is_compiling():
        why = f"x is {x.dtype}; kernels multiply bfloat16 by quantized weights"
        fall_back("grouped_gemm", x, "auto", why)
    b = weight if upright else transposed_weight(weight)
    stored = as_bytes(b.qdata), b.compact_bytes(), b.global_scale, b.format_name
    return ops.grouped_values(x, *stored, list(b.shape), b.axis, offsets, dtype)


def _of_two(
    x: Tensor,
    stacks: tuple[ScaledTensor, ScaledTensor],
    offsets: Tensor,
    dtype: torch.dtype,
    upright: bool,
) -> Tensor:
    """Their global scales may differ, and joining them would copy the weights in every call."""
    if not upright:
        return torch.cat([product(x, w, offsets, dtype, upright=False) for w in stacks], 1)
    halves = zip(x.chunk(2, 1), stacks, strict=True)
    first, second = (product(g, w, offsets, torch.float32, upright=True) for g, w in halves)
    return (first + second).to(dtype)
