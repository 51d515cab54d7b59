"""Which kernel multiplies which formats, and its operands as it wants them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..formats import Format, formats, get_format
from ..kernels import gpu, sm90
from ..kernels.sm90.dequantized_gemm import exact_gemm
from ..kernels.sm90.loadable import loadable
from ..layouts import get_layout

__all__ = [
    "FP8",
    "KERNELS",
    "WIDENED",
    "Side",
    "detached",
    "global_product",
    "multiply",
    "scale_matrix",
]


_BIASES = (torch.bfloat16, torch.float16, torch.float32)  # that kernels read


#: Formats whose elements tensor cores take as they are, with scales per 128 along K.
FP8 = ("fp8_1x128", "fp8_128x128")
#: Formats whose elements, times their scales, are exact in bf16.
WIDENED = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")

T = TypeVar("T", Tensor, Tensor | None)


class Side(NamedTuple):
    """An operand: see ``gemm``."""

    data: Tensor
    scale: Tensor | None
    global_scale: Tensor | None
    format: str | None
    layout: str
    shape: Sequence[int]

    @property
    def kind(self) -> Format:
        """Of a quantized operand; ValueError of a plain one."""
        return get_format(self.format or "none")


def detached(x: T) -> T:
    """Kernels take no tensors that require gradients, whatever the mode."""
    return x.detach() if x is not None and x.requires_grad else x


def scale_matrix(side: Side, axis: int) -> Tensor:
    """Scales (rows, blocks) of an operand, the contraction last; a view."""
    if side.scale is None:
        raise TypeError("scale_matrix: a plain matrix has no scales")
    if side.layout == "compact":
        return side.scale if axis == -1 else side.scale.mT
    rows = -(-side.shape[-3 - axis] // side.kind.block[0])
    return side.scale.mT[:rows]


#: Of an operand pair, bias, output, whether to add to it, and its type; or Unsupported.
Kernel = Callable[[Side, Side, Tensor | None, Tensor | None, bool, torch.dtype], Tensor]


def multiply(
    a: Side,
    b: Side,
    bias: Tensor | None,
    out: Tensor | None,
    accumulate: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """``a @ b + bias`` by a kernel, in ``out`` if that is given; Unsupported if there is none."""
    reason = sm90.unsupported(a.data.device)
    if reason:
        raise gpu.Unsupported(reason)
    run = KERNELS.get((a.format, b.format))
    if run is None:
        raise gpu.Unsupported(f"no kernel multiplies {a.format or 'bf16'} by {b.format}")
    a, bias, out = a._replace(data=detached(a.data)), detached(bias), detached(out)
    if bias is not None and (bias.dtype not in _BIASES or bias.stride() != (1,)):
        bias = bias.float().contiguous()
    if out is None or out.stride(1) == 1:
        return run(a, b, bias, out, accumulate, out_dtype)
    # rows that do not lie together are written by a copy
    rows = out.contiguous() if accumulate else None
    return out.copy_(run(a, b, bias, rows, accumulate, out_dtype))


# --- FP8 with fp32 scales per 128 -----------------------------------------------------------------


def _fp8(
    a: Side,
    b: Side,
    bias: Tensor | None,
    out: Tensor | None,
    accumulate: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    few = b.kind.block[0] > 1
    return sm90.gemm(
        _along_k("a", a.data),
        _by_rows(a, -1),
        _along_k("b", b.data.mT),
        scale_matrix(b, -2) if few else _by_rows(b, -2),
        b_block=b.kind.block,
        out_dtype=out_dtype,
        c=out,
        accumulate=accumulate,
        bias=bias,
    )


def _along_k(name: str, data: Tensor) -> Tensor:
    """A matrix whose contraction is contiguous; Unsupported otherwise."""
    if data.stride(1) != 1 and data.shape[1] > 1:
        raise gpu.Unsupported(
            f"{name}: its contraction is not contiguous, as FP8 tensor cores need it: quantize "
            "columns (axis=-2) with k_major=True"
        )
    return loadable(data)


def _by_rows(side: Side, axis: int) -> Tensor:
    """A scale for each row and block, in layout "sm90", where they are read as they are."""
    rows = side.kind.block[0]
    if side.layout == "sm90" and rows == 1 and side.scale is not None:
        return side.scale
    matrix = scale_matrix(side, axis)
    if rows > 1:
        matrix = matrix.repeat_interleave(rows, 0)[: side.shape[-3 - axis]]
    return get_layout("sm90").swizzle(matrix)


# --- formats that are widened to bf16 -------------------------------------------------------------


def _widened(
    a: Side,
    b: Side,
    bias: Tensor | None,
    out: Tensor | None,
    accumulate: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    return exact_gemm(
        a.data,
        None if a.scale is None else scale_matrix(a, -1),
        a.format,
        b.data.mT,
        scale_matrix(b, -2),
        b.kind.name,
        alpha=global_product(a.global_scale, b.global_scale),
        bias=bias,
        out_dtype=out_dtype,
        c=out,
        accumulate=accumulate,
    )


def global_product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """What a sum of unscaled products is to be multiplied by."""
    return b if a is None else a if b is None else a * b


#: Of the formats of ``a`` and ``b``; None is bf16.
KERNELS: Mapping[tuple[str | None, str | None], Kernel] = {
    **dict.fromkeys(product(FP8, FP8), _fp8),
    **{
        (x, y): _widened
        for x, y in product((None, *WIDENED), WIDENED)
        if x is None or formats[x].multiplies(formats[y])
    },
}
