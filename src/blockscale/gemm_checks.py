"""Whether the arguments of a product belong together; what is said where they do not."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from . import ops
from .checks import choose
from .formats import get_format
from .kernels.common.calls import Groups
from .layouts import SPREADING
from .tensor import ScaledTensor
from .tensor_checks import DTYPES, check_counts, check_offsets
from .watching import refuse_tangents

__all__ = ["check_batch", "check_grouped", "check_groups_given", "check_product"]

_QUANTIZED = "a ScaledTensor: call blockscale.quantize"


def check_product(
    a: Any,
    b: Any,
    out_dtype: torch.dtype | None,
    out: Any,
    accumulate: bool,
    bias: Any,
    backend: str,
) -> torch.dtype:
    """The type of the product of ``gemm``; raises as it does."""
    _check_types(a, b, out, bias)
    choose("backend", backend, dict.fromkeys(ops.BACKENDS))
    dtype = _product_dtype(out_dtype, out)
    _check_operands(a, b)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a, b: got {tuple(a.shape)} @ {tuple(b.shape)}; expected (M, K) @ (K, N)")
    _check_rest((a.shape[0], b.shape[1]), a.device, dtype, out, accumulate, bias)
    return dtype


def _check_types(a: Any, b: Any, out: Any, bias: Any) -> None:
    given = ("a", a), ("b", b), ("out", out), ("bias", bias)
    for name, x in given:
        if not isinstance(x, Tensor) and (x is not None or name in "ab"):
            wanted = _QUANTIZED if name in "ab" else "a torch.Tensor"
            raise TypeError(f"{name}: got {type(x).__name__}; expected {wanted}")
    plain = (x for _, x in given if not isinstance(x, ScaledTensor))
    refuse_tangents("block-scaled products have", *plain)


def _check_operands(a: Tensor, b: Tensor, grouped: bool = False) -> None:
    """Raise unless ``a`` and ``b`` are quantized so that they can be multiplied."""
    if isinstance(a, ScaledTensor):
        _check_operand("a", a, -1)
    elif a.dtype != torch.bfloat16:
        raise TypeError(
            f"a: got {a.dtype}; expected {_QUANTIZED}; or a bfloat16 matrix, which is multiplied "
            "as it is: call .bfloat16()"
        )
    _check_operand("b", b, -2)
    _check_pair(a, b)
    if not grouped and any(isinstance(x, ScaledTensor) and x.k_grouped for x in (a, b)):
        raise ValueError("a, b: blocks start anew in groups along K; use grouped_gemm")


def _check_rest(
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    out: Tensor | None,
    accumulate: bool,
    bias: Tensor | None,
) -> None:
    """Raise unless the arguments beside the operands fit a product of ``shape``."""
    if out is not None and out.dtype != dtype:
        raise TypeError(f"out: is {out.dtype}, out_dtype asks for {dtype}")
    if out is not None and tuple(out.shape) != shape:
        raise ValueError(f"out: has shape {tuple(out.shape)}; the product is {shape}")
    if out is not None and out.device != device:
        raise ValueError(f"out: is on {out.device}, a on {device}; move it there")
    if accumulate and out is None:
        raise ValueError("accumulate: needs out, the tensor to add to")
    n = shape[-1]
    if bias is not None and not bias.dtype.is_floating_point:
        raise TypeError(f"bias: got {bias.dtype}; expected a floating-point tensor ({n},)")
    if bias is not None and (tuple(bias.shape) != (n,) or bias.device != device):
        raise ValueError(
            f"bias: got {tuple(bias.shape)} on {bias.device}; expected ({n},) on {device}"
        )


def check_batch(
    a: Any,
    b: Any,
    out_dtype: torch.dtype | None,
    out: Any,
    accumulate: bool,
    bias: Any,
    backend: str,
) -> torch.dtype:
    """:func:`check_product` of batches of matrices."""
    _check_types(a, b, out, bias)
    lead = tuple(a.shape[:-2])
    if a.dim() != b.dim() or lead != tuple(b.shape[:-2]):
        remedy = "; to multiply all rows by one matrix, call gemm(a.flatten(0, -2), b)"
        raise ValueError(
            f"a, b: got {tuple(a.shape)} @ {tuple(b.shape)}; expected (M, K) @ (K, N), or "
            "(..., M, K) @ (..., K, N) with the same leading dimensions: there is no broadcasting"
            f"{remedy if b.dim() == 2 else ''}"
        )
    choose("backend", backend, dict.fromkeys(ops.BACKENDS))
    dtype = _product_dtype(out_dtype, out)
    _check_operands(a, b)
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"a, b: got {tuple(a.shape)} @ {tuple(b.shape)}; expected (..., M, K) @ (..., K, N)"
        )
    _check_rest((*lead, a.shape[-2], b.shape[-1]), a.device, dtype, out, accumulate, bias)
    return dtype


def check_groups_given(b: Any, offsets: Any, counts: Any) -> Groups:
    """Tells what is grouped of a product by ``b``; raises TypeError unless exactly one of the two
    is given."""
    if (offsets is None) == (counts is None):
        raise TypeError(
            f"offsets, counts: got {'neither' if counts is None else 'both'}; expected offsets, "
            "the end of each group, or counts, how many rows each has of (G, capacity, K)"
        )
    if counts is not None:
        return Groups(_together(counts), "masked")
    return Groups(_together(offsets), "k" if isinstance(b, Tensor) and b.dim() == 2 else "m")


def _together(given: Any) -> Any:
    """Values that lie one after another, as kernels read them; what is wrong is for later."""
    apart = isinstance(given, Tensor) and given.dim() == 1 and given.stride(0) != 1
    return given.contiguous() if apart else given


def check_grouped(
    a: Any,
    b: Any,
    groups: Groups,
    out_dtype: torch.dtype | None,
    out: Any,
    accumulate: bool,
    backend: str,
) -> torch.dtype:
    """The type of the product of ``grouped_gemm``; raises as it does."""
    choose("backend", backend, dict.fromkeys(ops.BACKENDS))
    _check_types(a, b, out, None)
    _check_operands(a, b, grouped=True)
    dtype = _product_dtype(out_dtype, out)
    (_check_masked if groups.grouping == "masked" else _check_offsets)(a, b, groups)
    lead = a.shape[:-1]
    if groups.grouping == "k":
        lead = groups.offsets.shape[0], a.shape[0]
    elif accumulate:
        raise ValueError("accumulate: groups of rows are not added to; only those along K are")
    _check_rest((*lead, b.shape[-1]), a.device, dtype, out, accumulate, None)
    return dtype


def _check_offsets(a: Tensor, b: Tensor, groups: Groups) -> None:
    offsets, k_grouped = groups.offsets, groups.grouping == "k"
    if k_grouped and not isinstance(a, ScaledTensor):
        raise TypeError(f"a: got {a.dtype}; expected {_QUANTIZED} with offsets=offsets, as b")
    shapes = f"got {tuple(a.shape)} and {tuple(b.shape)}"
    if a.dim() != 2 or b.dim() not in (2, 3) or a.shape[1] != b.shape[-2]:
        remedy = "; a batch (G, capacity, K) wants counts=" if a.dim() == 3 else ""
        raise ValueError(
            f"a, b: {shapes} with offsets; expected (M, K) and (G, K, N), whose rows are grouped, "
            f"or (M, K) and (K, N), whose contraction is{remedy}"
        )
    check_offsets(offsets, a.shape[-1 if k_grouped else 0], a.device)
    if not k_grouped and b.shape[0] != len(offsets):
        raise ValueError(
            f"offsets: {shapes} with {len(offsets)} groups; expected one offset for each matrix "
            "of b"
        )
    _check_blocks(a, b, offsets if k_grouped else None)
    if not k_grouped:
        _check_tiles(a, offsets)


def _check_masked(a: Tensor, b: Tensor, groups: Groups) -> None:
    counts = groups.offsets
    shapes = f"got {tuple(a.shape)} and {tuple(b.shape)}"
    count = b.shape[0] if b.dim() == 3 else 0
    rows = a.shape[0] * a.shape[1] if a.dim() == 3 else a.shape[0]
    lead = a.dim() == 3 and a.shape[0] == count
    if not count or not (lead or a.dim() == 2) or a.shape[-1] != b.shape[1] or rows % count:
        raise ValueError(
            f"a, b: {shapes} with counts; expected (G, capacity, K) and (G, K, N), or the rows of "
            "all groups as one matrix, (G * capacity, K)"
        )
    check_counts(counts, rows // count, a.device)
    if len(counts) != count:
        raise ValueError(f"counts: {shapes} with {len(counts)} counts; expected one for each of b")
    _check_blocks(a, b, None)
    if _in_tiles(a):
        raise ValueError(
            "a: was quantized with offsets, by which its scales lie; counts are of equal parts of "
            "the rows: quantize it without offsets"
        )


def _check_blocks(a: Tensor, b: Tensor, offsets: Tensor | None) -> None:
    """Raise unless blocks start anew at ``offsets`` along K, if these are given, and only then."""
    k_grouped = offsets is not None
    for name, q in (("a", a), ("b", b)):
        if not isinstance(q, ScaledTensor):
            continue
        if k_grouped != q.k_grouped:
            raise ValueError(
                f"{name}: its blocks {'do not ' * k_grouped}start anew in each group along K; "
                + (
                    "quantize it with axis=-2 and offsets=offsets; or, where rows are grouped, b "
                    "is (G, K, N), a matrix for each group"
                    if k_grouped
                    else "quantize it without offsets along the contraction"
                )
            )
        if offsets is not None and not _same(q.offsets, offsets):
            raise ValueError(f"offsets: differ from those that {name} was quantized with")


def _check_tiles(a: Tensor, offsets: Tensor) -> None:
    """ValueError where scales of ``a`` lie as other groups of rows have them."""
    if _in_tiles(a) and not _same(a.offsets, offsets):
        raise ValueError(
            "offsets: differ from those that a was quantized with, by which its scales lie"
        )


def _in_tiles(a: Tensor) -> TypeGuard[ScaledTensor]:
    """Whether the scales of each group of rows begin with a tile of their own."""
    return isinstance(a, ScaledTensor) and a.offsets is not None and a.layout_name in SPREADING


def _same(a: Tensor | None, b: Tensor) -> bool:
    if a is b or torch.compiler.is_compiling() or b.device.type != "cpu":
        return True  # reading them would wait for the device
    return a is not None and torch.equal(a, b)


def _check_operand(name: str, q: Tensor, axis: int) -> None:
    if not isinstance(q, ScaledTensor):
        raise TypeError(f"{name}: got {q.dtype}; expected {_QUANTIZED}")
    if q.axis != axis:
        raise ValueError(
            f"{name}: is blocked along axis {q.axis}, but is contracted along axis {axis}; its "
            "bytes cannot be blocked anew: quantize the high-precision tensor along its "
            f"contraction (axis={axis}; of a transposed view, axis={-3 - axis} and then .mT), or "
            f"pass {name}.mT if its other side is contracted"
        )


def _check_pair(a: Tensor, b: Tensor) -> None:
    if isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor):
        x, y = get_format(a.format_name), get_format(b.format_name)
        if not x.multiplies(y):
            raise ValueError(
                f"a, b: formats {x.name!r} and {y.name!r} cannot be multiplied: blocks of "
                f"{x.block_size} and {y.block_size} with {x.scale.name} and {y.scale.name} scales; "
                "quantize both alike"
            )
    if a.device != b.device:
        raise ValueError(f"a, b: are on {a.device} and {b.device}; move one of them")


def _product_dtype(out_dtype: torch.dtype | None, out: Tensor | None) -> torch.dtype:
    """What is asked for, else that of ``out``, else bfloat16; TypeError where no product has it."""
    if out is None or out_dtype is not None:
        name, dtype = "out_dtype", out_dtype or torch.bfloat16
    else:
        name, dtype = "out", out.dtype
    if dtype not in DTYPES:
        raise TypeError(f"{name}: got {dtype}; choose torch.bfloat16, float16 or float32")
    return dtype
