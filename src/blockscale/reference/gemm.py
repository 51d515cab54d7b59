"""Products of block-scaled matrices: dequantize, multiply, round once."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["bounds", "epilogue", "gemm", "grouped_gemm"]


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    bias: Tensor | None = None,
    c: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``a @ b + bias + c`` in ``compute_dtype`` (fp32 or fp64), rounded once to ``out_dtype``.

    ``a`` (M, K) and ``b`` (K, N) are dequantized operands, ``bias`` (N,), ``c`` (M, N).
    Both are multiplied K-major: a BLAS may add in another order where strides differ.
    """
    left, right = a.to(compute_dtype).contiguous(), b.to(compute_dtype).mT.contiguous().mT
    with torch.autocast(a.device.type, enabled=False):  # it would round the operands
        out = left @ right
    return epilogue(out, out_dtype, bias, c)


def epilogue(acc: Tensor, out_dtype: torch.dtype, bias: Tensor | None, c: Tensor | None) -> Tensor:
    """``acc + bias + c`` in the dtype of the accumulators, rounded once to ``out_dtype``."""
    if bias is not None:
        acc = acc + bias.to(acc.dtype)
    if c is not None:
        acc = acc + c.to(acc.dtype)
    return acc.to(out_dtype)


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    masked: bool = False,
    out_dtype: torch.dtype = torch.float32,
    c: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """One product a group; ``offsets`` (G,) int32 holds the end of each group, or, of ``masked``
    ones, how many rows it has.

    m_grouped (fprop, dgrad): ``a`` (M, K) whose rows are grouped, ``b`` (G, K, N) -> (M, N);
    rows past the last offset are zero. k_grouped (wgrad): ``a`` (M, K), ``b`` (K, N), grouped along
    K -> (G, M, N), to which ``c`` is added; an empty group gives zeros. masked: as m_grouped, but
    each group has the same share of the rows, of which the first ones are multiplied; the others
    are zero here.
    """
    groups = bounds(offsets, a.shape[0], masked)
    if b.ndim == 3:
        out = a.new_zeros(a.shape[0], b.shape[-1], dtype=out_dtype)
        for i, (start, end) in enumerate(groups):
            out[start:end] = gemm(
                a[start:end], b[i], out_dtype=out_dtype, compute_dtype=compute_dtype
            )
        return out
    multiply = partial(gemm, out_dtype=out_dtype, compute_dtype=compute_dtype)
    added = [None] * len(groups) if c is None else c.unbind()
    return torch.stack(
        [
            multiply(a[:, start:end], b[start:end], c=each)
            for (start, end), each in zip(groups, added, strict=True)
        ]
    )


def bounds(offsets: Tensor, rows: int, masked: bool = False) -> list[tuple[int, int]]:
    """First row of each group and the one after its last, of ``grouped_gemm``."""
    if masked:
        capacity = rows // len(offsets)
        return [(i * capacity, i * capacity + n) for i, n in enumerate(offsets.tolist())]
    return list(pairwise([0, *offsets.tolist()]))
