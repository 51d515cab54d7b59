"""Products by kernels, and what they do not multiply."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np

from ..dtypes import FLOAT32
from ..kernels.common.epilogue import Epilogue
from ..kernels.sm90 import config as fp8_config
from ..kernels.sm90 import mixed_config
from ..kernels.sm90.mixed_config import BF16
from ..kernels.sm100 import config as sm100_config
from . import gpu_blackwell, gpu_hopper
from .array import ScaledArray
from .gpu_operand import Operand, alpha_of
from .target import Target

__all__ = ["columns", "grouped", "multiplied", "unsupported", "unsupported_columns"]

_TMA = 16  # bytes that rows start at multiples of


def unsupported(
    a: ScaledArray | jax.Array, b: ScaledArray, out: np.dtype, target: Target, groups: int = 0
) -> str:
    """Why kernels cannot multiply these; empty where they can."""
    left, right = (_Side.of(x, axis) for x, axis in ((a, -1), (b, -2)))
    arch, names = target.gpu.arch, (left.name, right.name)
    if arch != "sm_90a":
        if left.name is None:
            return "a: no kernel multiplies bf16 by quantized weights on Blackwell"
        reason = sm100_config.why_not(left.name, right.name or "", out, arch)
        if not reason and groups > sm100_config.MOST_GROUPS:
            return f"offsets: {groups} groups; kernels take {sm100_config.MOST_GROUPS} at most"
        return reason
    if right.name in fp8_config.FORMATS:
        if left.name is None:
            return f"a: no kernel multiplies bf16 by {right.name}"
        if groups and names != ("fp8_1x128", "fp8_128x128"):
            return f"a, b: grouped, no kernel multiplies {left.name} by {right.name}"
        return fp8_config.why_not(right.row_bytes, out, right.name, arch)
    reason = mixed_config.why_not(left.name or BF16, right.name or "", out, arch)
    if not reason and (left.row_bytes % _TMA or right.row_bytes % _TMA):
        return f"a, b: TMA wants rows of a multiple of {_TMA} bytes; pad K with zeros"
    return reason


def unsupported_columns(
    a: ScaledArray, b: ScaledArray, out: np.dtype, groups: int, target: Target
) -> str:
    """The same of groups along K."""
    for name, q in (("a", a), ("b", b)):
        if q.length is None:
            return (
                f"{name}: its contraction is not contiguous, and kernels take groups only so: "
                "quantize columns (axis=-2) with k_major=True"
            )
    if target.gpu.arch != "sm_90a":
        return unsupported(a, b, out, target, groups)
    if a.format in fp8_config.FORMATS and a.format != b.format:
        return f"a, b: no kernel multiplies groups along K of {a.format} by {b.format}"
    return unsupported(a, b, out, target)


class _Side(NamedTuple):
    """An operand's format, by its name, and its bytes along the contraction."""

    name: str | None
    row_bytes: int

    @classmethod
    def of(cls, x: ScaledArray | jax.Array, axis: int) -> _Side:
        if not isinstance(x, ScaledArray):
            return cls(None, x.shape[axis] * x.dtype.itemsize)
        return cls(x.format, x.data.shape[-3 - axis if x.turned[0] else axis])


def multiplied(
    a: ScaledArray | jax.Array,
    b: ScaledArray,
    bias: jax.Array | None,
    out: np.dtype,
    target: Target,
) -> jax.Array:
    """``a @ b + bias``, matrices; accumulated in fp32, rounded once."""
    left, right = Operand.of(a, -1), Operand.of(b, -2)
    return _of(target).multiplied(left, right, *_ends(left, right, bias, out), target)


def grouped(
    a: ScaledArray | jax.Array,
    b: ScaledArray,
    offsets: jax.Array,
    out: np.dtype,
    target: Target,
) -> jax.Array:
    """The product of each group of rows by its matrix; zeros after the last group."""
    left, right = Operand.of(a, -1), Operand.of(b, -2)
    return _of(target).grouped(left, right, offsets, *_ends(left, right, None, out), target)


def columns(
    a: ScaledArray, b: ScaledArray, offsets: jax.Array, out: np.dtype, target: Target
) -> jax.Array:
    """The product (groups, M, N) of each group along K, of operands whose groups are apart."""
    left, right, groups = Operand.of(a, -1), Operand.of(b, -2), offsets.shape[0]
    ends = _ends(left, right, None, out, groups)
    product = _of(target).columns(left, right, offsets, *ends, target)
    return product.reshape(groups, -1, product.shape[-1])


def _ends(
    a: Operand, b: Operand, bias: jax.Array | None, out: np.dtype, outputs: int = 1
) -> tuple[Epilogue, tuple[Any, ...]]:
    """What is done with accumulators, and what kernels take for it: the output, or several one
    below the other, bias and alpha."""
    m, n = outputs * a.data.shape[0], b.data.shape[-2]
    alpha, ranks = alpha_of(a, b)
    bias = None if bias is None else bias.astype(FLOAT32)
    epilogue = Epilogue(
        out,
        bias=None if bias is None else FLOAT32,
        alpha=ranks,
        tma_store=n * out.itemsize % _TMA == 0,
    )
    return epilogue, (jax.ShapeDtypeStruct((m, n), out), bias, alpha)


def _of(target: Target) -> ModuleType:
    return gpu_hopper if target.gpu.arch == "sm_90a" else gpu_blackwell
