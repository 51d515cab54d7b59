"""``gemm`` and ``grouped_gemm``: check that the operands belong together, dispatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import ops
from .checks import check_flag
from .gemm_checks import check_batch, check_grouped, check_groups_given, check_product
from .gemm_launch import find_call, remember
from .kernels.common.calls import Groups
from .layouts import SPREADING
from .memory import as_bytes
from .ops.gemm import check_out
from .ops.gemm_kernels import as_rows
from .ops.gemm_operands import GROUPED_TILES, Side
from .ops.operation import needs_gradient
from .stored import is_per_matrix
from .tensor import ScaledTensor
from .watching import unwatched

__all__ = ["gemm", "grouped_gemm", "side", "sides_of_groups"]

_Side = tuple[Any, Any, Any, Any, str, Any]  # the fields of ``Side``
_READ = ("sm90", "tcgen05")  # layouts that some kernel reads; others go to it compact


def gemm(
    a: ScaledTensor | Tensor,
    b: ScaledTensor,
    out_dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    bias: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """``a @ b`` with fp32 accumulation, as torch.mm; matrices of a batch one by one, as torch.bmm.

    >>> x, w = torch.randn(64, 512), torch.randn(256, 512)
    >>> bs.gemm(bs.quantize(x, "mxfp8"), bs.quantize(w, "mxfp8").mT).shape
    torch.Size([64, 256])

    On Hopper kernels multiply all formats of 8 and 4 bits, and fp8_1x128 by mxfp4 weights, at FP8's
    rate, and by nvfp4 ones: their values are not rounded again. FP8 operands, and weights that they
    meet, have to lie with the contraction contiguous: rows do, columns (axis=-2) do with
    ``quantize(..., k_major=True)``. Scales of fp8_1x128 are read in layout "sm90"
    (``quantize(..., layout="sm90")``), others compact; those that lie otherwise, and those of an
    ``a`` in 128 x 128 blocks, are rewritten in every call, by one to three small kernels.
    docs/numerics.md says how exact the sums are.

    On Blackwell (sm_100a, sm_103a) kernels multiply mxfp8, mxfp8_e5m2 and mxfp4 in any pair, and
    nvfp4 by nvfp4, 8-bit data in either order. Scales are read in layout "tcgen05"
    (``quantize(..., layout="tcgen05")``); others are rewritten in every call, by a few small
    kernels. Data is copied in every call whose rows do not start at a multiple of 16 bytes; beside
    an 8-bit operand, mxfp4 whose rows do not at one of 32, and both where K is no multiple of 128.
    These kernels have run in the emulator only.

    On a CPU up to 16 rows by a weight that lies along K are one compiled loop, whose bits are the
    same on every processor; torch multiplies others, of what a compiled loop dequantizes.

    Args:
        a: (..., M, K), blocked along axis -1; or a plain bfloat16 matrix, which is not quantized
            (weight-only): its products with the values of ``b`` are summed in fp32.
        b: (..., K, N), with the leading dimensions of ``a``, blocked along axis -2: ``w.mT`` for a
            weight (N, K) quantized along axis -1.
        out_dtype: bfloat16 (default), float16 or float32.
        out: write here, (..., M, N); its dtype is the default of ``out_dtype``. Its memory may not
            be that of another argument.
        accumulate: add to ``out`` (in fp32, before the one rounding) instead of overwriting it.
        bias: (N,), added before rounding.
        backend: "auto": a kernel where there is one, else plain torch (said by a FallbackWarning on
            a GPU); "kernel": a ValueError where there is none; "reference": plain torch.

    Returns: (..., M, N), or ``out``.

    Raises ValueError or TypeError, with the remedy, where formats, axes, shapes, devices or dtypes
    do not belong together. A tensor blocked along the other axis is not transposed: that would
    need the high-precision values.
    """
    check_flag("accumulate", accumulate)
    call = find_call(a, b, out_dtype, out, accumulate, bias, backend)
    if call is not None:
        launch, left, right, _ = call
        if launch is not None:
            return launch(left, right, out, bias)
    if isinstance(a, Tensor) and isinstance(b, ScaledTensor) and max(a.dim(), b.dim()) > 2:
        return _batched(a, b, out_dtype, out, accumulate, bias, backend)
    dtype = check_product(a, b, out_dtype, out, accumulate, bias, backend)
    sides = *side(a), *side(b)
    if out is None:
        product = ops.gemm(*sides, bias, None, dtype, backend)
    elif needs_gradient(a, bias, out):  # there is none for what is written in place
        c = out if accumulate else None
        product = out.copy_(ops.gemm(*sides, bias, c, dtype, backend))
    else:
        ops.gemm_out(*sides, bias, out, accumulate, backend)
        product = out
    if call is not None:
        remember(call, (Side(*sides[:6]), Side(*sides[6:])), out, bias, dtype, accumulate)
    return product


def _batched(
    a: Tensor,
    b: ScaledTensor,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    accumulate: bool,
    bias: Tensor | None,
    backend: str,
) -> Tensor:
    """The products of each pair of matrices, with the bits of their own calls."""
    dtype = check_batch(a, b, out_dtype, out, accumulate, bias, backend)
    if out is None:
        return _products(a, b, None, bias, dtype, backend)
    if needs_gradient(a, bias, out) or not unwatched() or out.is_meta:
        # all is read before anything is written: where memory lies cannot be asked
        c = out if accumulate else None
        return out.copy_(_products(a, b, c, bias, dtype, backend))
    data, scale = (a.qdata, a.qscale) if isinstance(a, ScaledTensor) else (a, None)
    check_out(out, (data, scale, b.qdata, b.qscale, bias))  # of all, before the first is written
    for x, y, z in zip(a.unbind(), b.unbind(), out.unbind(), strict=True):
        gemm(x, y, dtype, out=z, accumulate=accumulate, bias=bias, backend=backend)  # type: ignore[arg-type]
    return out


def _products(
    a: Any, b: Any, c: Tensor | None, bias: Tensor | None, dtype: torch.dtype, backend: str
) -> Tensor:
    """Multiply matrices or batches that were checked; no argument is written to."""
    if a.dim() == 2 and c is None:
        return gemm(a, b, dtype, bias=bias, backend=backend)
    if a.dim() == 2:
        return ops.gemm(*side(a), *side(b), bias, c, dtype, backend)
    if not a.shape[0]:
        return _empty_batch(a, b, bias, dtype)
    cs = [None] * a.shape[0] if c is None else c.unbind()
    pairs = zip(a.unbind(), b.unbind(), cs, strict=True)
    return torch.stack([_products(x, y, z, bias, dtype, backend) for x, y, z in pairs])


def _empty_batch(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply an empty batch by torch, which gives the gradients, too."""
    left = torch.empty(a.shape, device=a.device) if isinstance(a, ScaledTensor) else a
    empty = left.to(dtype) @ torch.empty(b.shape, dtype=dtype, device=b.device)
    return empty if bias is None else empty + bias.to(dtype)


def grouped_gemm(
    a: ScaledTensor | Tensor,
    b: ScaledTensor,
    offsets: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    counts: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    backend: str = "auto",
) -> Tensor:
    """One product a group (expert), as torch's grouped_mm.

    m_grouped (fprop, dgrad): ``a`` (M, K) whose rows are grouped, ``b`` (G, K, N) -> (M, N), rows
    past the last offset zero. k_grouped (wgrad): ``a`` (M, K) and ``b`` (K, N), both quantized with
    ``offsets`` along K -> (G, M, N). Groups may have any number of rows, none too.

    masked (decoding): ``a`` (G, capacity, K), ``b`` (G, K, N) and ``counts`` -> (G, capacity, N):
    the first ``counts[g]`` rows of each group are multiplied. What the others hold is not defined:
    kernels do not write them, and plain torch and CPUs set them to zero.

    On Hopper one kernel multiplies all groups of rows: of fp8_1x128 (layout "sm90") by
    fp8_128x128, mxfp4 or nvfp4 weights; of mxfp8, mxfp8_e5m2 and mxfp4 in any pair, nvfp4 by nvfp4,
    and bf16 by any of these, exactly, after a kernel that writes ``a`` in bf16. It reads the
    offsets on the device, so that the host waits for nothing and a CUDA graph may change them.
    Scales of a batch are compact: give fp8_1x128, whose kernel reads those of a matrix, as (G *
    capacity, K) in layout "sm90", for a product (G * capacity, N); else they are rewritten in
    every call. One kernel multiplies groups along K, too, of columns quantized with
    ``k_major=True``: fp8_1x128 (in layout "sm90"), or the exact formats, after kernels that
    write both in bf16. Others, and 128 x 128 blocks of ``a``, run as plain torch, which reads
    the offsets back.

    On Blackwell one kernel multiplies groups of rows, masked ones and those along K of the formats
    of :func:`gemm`, 8-bit data with the contraction contiguous (columns with ``k_major=True``).
    Scales of ``a`` are read where they are in layout "tcgen05", quantized with these ``offsets``;
    others, and those of ``b`` (G, K, N), are rewritten in every call. These kernels have run in the
    emulator only. On a CPU each group has the bits of :func:`gemm`, and groups along K run as plain
    torch, as on other GPUs.

    >>> ends = torch.tensor([96, 256], dtype=torch.int32)  # rows of two experts
    >>> x, w = torch.randn(256, 512), torch.randn(2, 128, 512)
    >>> bs.grouped_gemm(bs.quantize(x, "mxfp8"), bs.quantize(w, "mxfp8").mT, ends).shape
    torch.Size([256, 128])
    >>> counts = torch.tensor([3, 16], dtype=torch.int32)
    >>> bs.grouped_gemm(torch.randn(2, 16, 512).bfloat16(), bs.quantize(w).mT, counts=counts).shape
    torch.Size([2, 16, 128])
    >>> columns = {"axis": -2, "offsets": ends, "layout": "sm90", "k_major": True}
    >>> x, g = (bs.quantize(torch.randn(256, n), "fp8_1x128", **columns) for n in (512, 128))
    >>> bs.grouped_gemm(g.mT, x, ends, torch.float32).shape
    torch.Size([2, 128, 512])

    Args:
        a, b: blocked along axes -1 and -2. Where rows are grouped ``a`` may be a plain bfloat16
            matrix, which is multiplied as it is (weight-only) and gets a gradient. Each matrix of a
            batch may have a global scale of its own.
        offsets: int32 (G,), on the device of ``a``: the end of each group, ascending. Their values
            are looked at on a CPU alone: on a GPU that would wait for it. A kernel takes one that
            is less than the one before, or more than M, for the nearest that is not; with
            BLOCKSCALE_CHECK_OFFSETS=1 in the environment, which is read at the first call, it is a
            ValueError there, too. Compiled code looks at none, on a CPU either; and on a GPU those
            that ``a`` was quantized with are taken for these.
        out_dtype: bfloat16 (default), float16 or float32.
        counts: instead of ``offsets``, int32 (G,): how many rows each group has. Looked at as those
            are; a kernel takes one above the capacity for the capacity.
        out: write here, as of :func:`gemm`.
        accumulate: add to ``out`` (in fp32, before the one rounding); of groups along K only.
        backend: as of :func:`gemm`.

    Raises ValueError or TypeError as :func:`gemm`.
    """
    check_flag("accumulate", accumulate)
    groups = check_groups_given(b, offsets, counts)
    call = find_call(a, b, out_dtype, out, accumulate, None, backend, groups)
    if call is not None and call[0] is not None:
        return call[0](call[1], call[2], out, None, groups.offsets)
    dtype = check_grouped(a, b, groups, out_dtype, out, accumulate, backend)
    left, right = sides_of_groups(a, b, groups)
    sides = *left, *right
    given = *sides, *groups
    rows = None if out is None or needs_gradient(a, None, out) else as_rows(out)
    if out is None or rows is None:
        made = ops.grouped_gemm(*given, out if accumulate else None, dtype, backend)
        made = made.unflatten(0, a.shape[:2]) if a.dim() == 3 else made
        product = made if out is None else out.copy_(made)
    else:
        ops.grouped_gemm_out(*given, rows if a.dim() == 3 else out, accumulate, backend)
        product = out
    if call is not None:
        operands = Side(*sides[:6]), Side(*sides[6:])
        shape = product.shape if product.dim() == 3 else None
        remember(call, operands, out, None, dtype, accumulate, groups, shape)
    return product


def side(x: Tensor) -> _Side:
    """An operand as the ops take it."""
    if not isinstance(x, ScaledTensor):
        return x, None, None, None, "compact", x.shape
    together = x.offsets is None or x.k_grouped or x.layout_name not in SPREADING
    direct = x.layout_name in _READ and together
    return (
        as_bytes(x.qdata),
        x.qscale if direct else x.compact_bytes(),
        x.global_scale,
        x.format_name,
        x.layout_name if direct else "compact",
        x.shape,
    )


def sides_of_groups(a: Tensor, b: Tensor, groups: Groups) -> tuple[_Side, _Side]:
    """Operands of ``grouped_gemm`` as the ops take them."""
    return _rows(a, groups.offsets), side(b) if groups.grouping == "k" else _compact(b)


def _rows(a: Tensor, offsets: Tensor) -> _Side:
    """The rows of all groups, as the ops take them."""
    if isinstance(a, ScaledTensor) and is_per_matrix(a.global_scale, a.shape):
        one = a.global_scale.new_ones(())
        data, scale, _, *how = side(a._with(global_scale=one).flatten(0, 1))
        return data, scale, a.global_scale, *how
    if a.dim() == 3:
        return side(a.flatten(0, 1))
    if not isinstance(a, ScaledTensor) or a.k_grouped or a.offsets is None:
        return side(a)
    if a.layout_name != "tcgen05" or a.offsets is not offsets:
        return side(a)  # whose compact scales are those of any groups
    stored = as_bytes(a.qdata), a.qscale, a.global_scale
    return *stored, a.format_name, GROUPED_TILES, a.shape


def _compact(q: Any) -> _Side:
    """An operand as the ops take it, whose scales are compact."""
    return as_bytes(q.qdata), q.compact_bytes(), q.global_scale, q.format_name, "compact", q.shape
