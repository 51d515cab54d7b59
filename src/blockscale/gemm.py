"""``gemm`` and ``grouped_gemm``: check that the operands belong together, dispatch."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .formats import get_format
from .layouts import as_bytes
from .tensor import ScaledTensor, check_offsets

__all__ = ["gemm", "grouped_gemm"]

_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def gemm(
    a: ScaledTensor,
    b: ScaledTensor,
    out_dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """``a @ b`` with fp32 accumulation, as torch.mm.

    Args:
        a: (M, K), blocked along axis -1.
        b: (K, N), blocked along axis -2: ``w.mT`` for a weight (N, K) quantized along axis -1.
        out_dtype: bfloat16 (default), float16 or float32.
        out: write here, (M, N); its dtype is the default of ``out_dtype``.
        accumulate: add to ``out`` (in fp32, before the one rounding) instead of overwriting it.
        bias: (N,), added before rounding.

    Returns: (M, N), or ``out``.

    Raises ValueError or TypeError, with the remedy, where formats, axes, shapes, devices or dtypes
    do not belong together. A tensor blocked along the other axis is not transposed: that would
    need the high-precision values.
    """
    _check_operand("a", a, -1)
    _check_operand("b", b, -2)
    _check_pair(a, b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a, b: got {tuple(a.shape)} @ {tuple(b.shape)}; expected (M, K) @ (K, N)")
    if a.k_grouped or b.k_grouped:
        raise ValueError("a, b: blocks start anew in groups along K; use grouped_gemm")
    m, n = a.shape[0], b.shape[1]
    dtype = _check_out_dtype(out_dtype, out)
    if out is not None and tuple(out.shape) != (m, n):
        raise ValueError(f"out: has shape {tuple(out.shape)}; the product is {(m, n)}")
    if out is not None and out.device != a.device:
        raise ValueError(f"out: is on {out.device}, a on {a.device}; move it there")
    if accumulate and out is None:
        raise ValueError("accumulate: needs out, the tensor to add to")
    if bias is not None and not (isinstance(bias, Tensor) and bias.is_floating_point()):
        given = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise TypeError(f"bias: got {given}; expected a floating-point tensor ({n},)")
    if bias is not None and (tuple(bias.shape) != (n,) or bias.device != a.device):
        raise ValueError(
            f"bias: got {tuple(bias.shape)} on {bias.device}; expected ({n},) on {a.device}"
        )
    product = _call(a, b, bias, out if accumulate else None, None, False, dtype)
    if out is None:
        return product
    return out.copy_(product)


def grouped_gemm(
    a: ScaledTensor,
    b: ScaledTensor,
    offsets: Tensor,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """One product a group (expert), as torch's grouped_mm.

    m_grouped (fprop, dgrad): ``a`` (M, K) whose rows are grouped, ``b`` (G, K, N) -> (M, N), rows
    past the last offset zero. k_grouped (wgrad): ``a`` (M, K) and ``b`` (K, N), both quantized with
    ``offsets`` along K -> (G, M, N).

    Args:
        a, b: blocked along axes -1 and -2.
        offsets: int32 (G,), on the device of ``a``: the end of each group.
        out_dtype: bfloat16 (default), float16 or float32.

    Raises ValueError or TypeError as :func:`gemm`.
    """
    _check_operand("a", a, -1)
    _check_operand("b", b, -2)
    _check_pair(a, b)
    dtype = _check_out_dtype(out_dtype, None)
    k_grouped = b.dim() == 2
    check_offsets(offsets, a.shape[-1 if k_grouped else 0], a.device)
    shapes = f"got {tuple(a.shape)} and {tuple(b.shape)} with {len(offsets)} groups"
    if a.dim() != 2 or b.dim() not in (2, 3) or a.shape[1] != b.shape[-2]:
        raise ValueError(f"a, b: {shapes}; expected (M, K) and (G, K, N), or (M, K) and (K, N)")
    if not k_grouped and b.shape[0] != len(offsets):
        raise ValueError(f"offsets: {shapes}; expected one offset for each matrix of b")
    for name, q in (("a", a), ("b", b)):
        if k_grouped != q.k_grouped:
            raise ValueError(
                f"{name}: its blocks {'do not ' * k_grouped}start anew in each group along K; "
                + (
                    "quantize it with axis=-2 and offsets=offsets"
                    if k_grouped
                    else "quantize it without offsets along the contraction"
                )
            )
        if k_grouped and not _same(q.offsets, offsets):
            raise ValueError(f"offsets: differ from those that {name} was quantized with")
    return _call(a, b, None, None, offsets, k_grouped, dtype)


def _same(a: Tensor | None, b: Tensor) -> bool:
    if a is b or torch.compiler.is_compiling() or b.device.type != "cpu":
        return True  # reading them would wait for the device
    return a is not None and torch.equal(a, b)


def _call(
    a: ScaledTensor,
    b: ScaledTensor,
    bias: Tensor | None,
    c: Tensor | None,
    offsets: Tensor | None,
    k_grouped: bool,
    dtype: torch.dtype,
) -> Tensor:
    sides = [
        part
        for q in (a, b)
        for part in (
            as_bytes(q.qdata),
            q.compact_bytes(),
            q.global_scale,
            q.format_name,
            q.shape,
        )
    ]
    return ops.gemm(*sides, bias, c, offsets, k_grouped, dtype)


def _check_operand(name: str, q: ScaledTensor, axis: int) -> None:
    if not isinstance(q, ScaledTensor):
        raise TypeError(
            f"{name}: got {type(q).__name__}; expected a ScaledTensor: call blockscale.quantize"
        )
    if q.axis != axis:
        raise ValueError(
            f"{name}: is blocked along axis {q.axis}, but is contracted along axis {axis}; its "
            "bytes cannot be blocked anew: quantize the high-precision tensor with "
            f"axis={axis}, or pass {name}.mT if its other side is contracted"
        )


def _check_pair(a: ScaledTensor, b: ScaledTensor) -> None:
    x, y = get_format(a.format_name), get_format(b.format_name)
    if not x.multiplies(y):
        raise ValueError(
            f"a, b: formats {x.name!r} and {y.name!r} cannot be multiplied: blocks of "
            f"{x.block_size} and {y.block_size} with {x.scale.name} and {y.scale.name} scales; "
            "quantize both alike"
        )
    if a.device != b.device:
        raise ValueError(f"a, b: are on {a.device} and {b.device}; move one of them")


def _check_out_dtype(out_dtype: torch.dtype | None, out: Tensor | None) -> torch.dtype:
    if out is not None and not isinstance(out, Tensor):
        raise TypeError(f"out: got {type(out).__name__}; expected a torch.Tensor")
    dtype = out_dtype or (out.dtype if out is not None else torch.bfloat16)
    if dtype not in _OUT_DTYPES:
        raise TypeError(f"out_dtype: got {dtype}; choose torch.bfloat16, float16 or float32")
    if out is not None and out.dtype != dtype:
        raise TypeError(f"out: is {out.dtype}, out_dtype asks for {dtype}")
    return dtype
