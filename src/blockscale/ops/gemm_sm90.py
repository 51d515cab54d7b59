"""Products on Hopper: which kernel multiplies which formats, and its operands as it wants them."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from ..formats import BY_WEIGHTS, formats
from ..kernels.common.calls import CompiledGemm, GemmCall, Groups, Operand
from ..kernels.common.gpu import Unsupported
from ..kernels.common.loadable import loadable
from ..kernels.sm90 import exact_gemm
from ..kernels.sm90.fp8_by_weights import plan_fp8_by_weights
from ..kernels.sm90.grouped_gemm import plan_groups
from ..kernels.sm90.plan import plan_gemm
from ..layouts import get_layout
from .gemm_operands import GroupedProducts, Products, Reading, Side, Take, scale_matrix

__all__ = ["PRODUCTS"]

# Formats whose elements tensor cores take as they are, with scales per 128 along K.
_FP8 = ("fp8_1x128", "fp8_128x128")
# Formats whose elements, times their scales, are exact in bf16.
_WIDENED = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")


_WIDENED_PAIRS = [
    (x, y)
    for x, y in product((None, *_WIDENED), _WIDENED)
    if x is None or formats[x].multiplies(formats[y])
]


# --- FP8 with fp32 scales per 128 -----------------------------------------------------------------


def _lay_fp8(a: Side, b: Side) -> tuple[Operand, Operand]:
    if b.format in _FP8:
        blocks = scale_matrix(b, -2) if b.kind.block[0] > 1 else _by_rows(b, -2)
    else:  # kernels read scales along the contraction
        blocks = scale_matrix(b, -2).contiguous()
    return (
        Operand(_along_k("a", a.data), _by_rows(a, -1), "fp8_1x128"),
        Operand(_along_k("b", b.data.mT), blocks, b.format),
    )


def _along_k(name: str, data: Tensor) -> Tensor:
    """A matrix, or a batch, whose contraction is contiguous; Unsupported otherwise."""
    if data.stride(-1) != 1 and data.shape[-1] > 1:
        raise Unsupported(
            f"{name}: its contraction is not contiguous, as this kernel takes it: quantize columns "
            "(axis=-2) with k_major=True"
        )
    return loadable(data) if data.dim() == 2 else data


def _by_rows(side: Side, axis: int, groups: Groups | None = None) -> Tensor:
    """A scale for each row and block, in layout "sm90", where they are read as they are."""
    rows = side.kind.block[0]
    if side.layout == "sm90" and rows == 1 and side.scale is not None:
        return side.scale.clone() if side.scale.data_ptr() % 16 else side.scale
    matrix = scale_matrix(side, axis, groups)
    if rows > 1:
        matrix = matrix.repeat_interleave(rows, 0)[: side.shape[-3 - axis]]
    return get_layout("sm90").swizzle(matrix)


# --- all ------------------------------------------------------------------------------------------


def _lay(a: Side, b: Side) -> tuple[Operand, Operand]:
    if a.format in _FP8:
        return _lay_fp8(a, b)
    return exact_gemm.lay(
        Operand(a.data, None if a.scale is None else scale_matrix(a, -1), a.format),
        Operand(b.data.mT, scale_matrix(b, -2), b.format),
    )


def _plan(call: GemmCall) -> CompiledGemm:
    if call.b.format in _FP8:
        return plan_gemm(call)
    return (plan_fp8_by_weights if call.a.format in _FP8 else exact_gemm.plan_exact)(call)


def _lay_groups(a: Side, b: Side, groups: Groups) -> tuple[Operand, Operand]:
    if b.scale is None:
        raise TypeError("b: is not quantized")
    if a.format in _FP8:
        left = Operand(_along_k("a", a.data), _by_rows(a, -1, groups), a.format)
    else:
        scale = None if a.scale is None else scale_matrix(a, -1, groups)
        left = Operand(a.data, scale, a.format)
        left = left._replace(data=loadable(left.data))
    blocks = b.scale.mT
    if b.format not in _FP8:  # kernels read scales along the contraction
        blocks = blocks.contiguous()
    return left, Operand(_along_k("b", b.data.mT), blocks, b.format)


def _lay_columns(a: Side, b: Side, groups: Groups) -> tuple[Operand, Operand]:
    """Of groups of columns, which are moved apart where K is contiguous."""
    if b.format in _FP8:
        return _lay_fp8(a, b)
    return (
        Operand(_along_k("a", a.data), scale_matrix(a, -1, groups), a.format),
        Operand(_along_k("b", b.data.mT), scale_matrix(b, -2, groups), b.format),
    )


# --- calls alike ----------------------------------------------------------------------------------


def _rows(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return data, scale


def _columns(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return data.mT, scale.mT


def _columns_by_rows(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Of scales in layout "sm90", which are not transposed."""
    return data.mT, scale


def _all_below_each_other(shape: torch.Size, stride: tuple[int, ...]) -> Take | None:
    """And their scales."""
    if stride[0] != shape[2] * stride[2]:
        return None
    return lambda data, scale: (data.mT.flatten(0, 1), scale.mT.flatten(0, 1))


def _below_each_other(shape: torch.Size, stride: tuple[int, ...]) -> Take | None:
    """Matrices of all groups, one below the other."""
    if stride[0] != shape[2] * stride[2]:
        return None
    return lambda data, scale: (data.mT.flatten(0, 1), scale.mT)


def _all_rows(shape: torch.Size, stride: tuple[int, ...]) -> Take | None:
    """Of a batch, whose scales are compact."""
    if stride[0] != shape[1] * stride[1]:
        return None
    return lambda data, scale: (data.flatten(0, 1), scale.flatten(0, 1))


def _read(layout: str, take: Take, scale_apart: int = 16) -> Reading:
    """However it is shaped."""
    return Reading(layout, lambda shape, stride: take, scale_apart=scale_apart)


PRODUCTS = Products(
    gpu="Hopper",
    formats=(
        "fp8_1x128 and fp8_128x128 in any pair, and fp8_1x128 by mxfp4 or nvfp4, the "
        "contraction contiguous; mxfp8, mxfp8_e5m2 and mxfp4 in any pair; nvfp4 by nvfp4; bf16 by "
        "any of these but FP8"
    ),
    pairs={
        *product(_FP8, _FP8),
        *BY_WEIGHTS,
        *_WIDENED_PAIRS,
    },
    lay=_lay,
    plan=_plan,
    readings={
        ("fp8_1x128", -1): _read("sm90", _rows),
        ("fp8_1x128", -2): _read("sm90", _columns_by_rows),
        ("fp8_128x128", -2): _read("compact", _columns, scale_apart=1),
        **{(name, -1): _read("compact", _rows) for name in _WIDENED},
        **{(name, -2): _read("compact", _columns) for name in _WIDENED},
    },
    k_major=True,
    grouped=GroupedProducts(
        "fp8_1x128 by fp8_128x128, mxfp4 or nvfp4; mxfp8, mxfp8_e5m2 and mxfp4 in any pair; nvfp4 "
        "by nvfp4; bf16 by any of these but FP8",
        {("fp8_1x128", "fp8_128x128"), *BY_WEIGHTS, *_WIDENED_PAIRS},
        _lay_groups,
        plan_groups,
        {
            ("fp8_128x128", -2): Reading("compact", _below_each_other, scale_apart=1),
            **{(name, -1): Reading("compact", _all_rows) for name in _WIDENED},
            **{(name, -2): Reading("compact", _all_below_each_other) for name in _WIDENED},
        },
    ),
    k_grouped=GroupedProducts(
        "fp8_1x128 by fp8_1x128; mxfp8, mxfp8_e5m2 and mxfp4 in any pair; nvfp4 by nvfp4; the "
        "contraction contiguous",
        {("fp8_1x128", "fp8_1x128"), *(pair for pair in _WIDENED_PAIRS if pair[0])},
        _lay_columns,
        plan_groups,
        {},
    ),
)
