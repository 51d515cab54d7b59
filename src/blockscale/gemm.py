"""``gemm`` and ``grouped_gemm``: check that the operands belong together, dispatch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import ops
from .checks import check_flag, check_offsets, choose
from .formats import get_format
from .gemm_launch import find_call, remember
from .layouts import as_bytes
from .ops.gemm import check_out
from .ops.gemm_operands import Side
from .ops.operation import needs_gradient
from .remember import remembered
from .tensor import ScaledTensor
from .watching import unwatched

__all__ = ["check_product", "gemm", "grouped_gemm", "side"]

_QUANTIZED = "a ScaledTensor: call blockscale.quantize"
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
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

    On Hopper kernels multiply all formats of 8 and 4 bits. 8-bit operands have to lie with the
    contraction contiguous: rows do, columns (axis=-2) do with ``quantize(..., k_major=True)``.
    Scales of fp8_1x128 are read in layout "sm90" (``quantize(..., layout="sm90")``), others
    compact; those that lie otherwise, and those of an ``a`` in 128 x 128 blocks, are rewritten in
    every call, by one to three small kernels. docs/numerics.md says how exact the sums are.

    On Blackwell (sm_100a, sm_103a) kernels multiply mxfp8, mxfp8_e5m2 and mxfp4 in any pair, and
    nvfp4 by nvfp4, 8-bit data in either order. Scales are read in layout "tcgen05"
    (``quantize(..., layout="tcgen05")``); others are rewritten in every call, by a few small
    kernels. Data is copied in every call whose rows do not start at a multiple of 16 bytes; beside
    an 8-bit operand, mxfp4 whose rows do not at one of 32, and both where K is no multiple of 128.
    These kernels have run in the emulator only.

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
        remember(call, Side(*sides[:6]), Side(*sides[6:]), out, bias, dtype, accumulate)
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
    _check_types(a, b, out, bias)
    lead = tuple(a.shape[:-2])
    if a.dim() != b.dim() or lead != tuple(b.shape[:-2]):
        remedy = "; to multiply all rows by one matrix, call gemm(a.flatten(0, -2), b)"
        raise ValueError(
            f"a, b: got {tuple(a.shape)} @ {tuple(b.shape)}; expected (M, K) @ (K, N), or "
            "(..., M, K) @ (..., K, N) with the same leading dimensions: there is no broadcasting"
            f"{remedy if b.dim() == 2 else ''}"
        )
    shape = (*lead, a.shape[-2], b.shape[-1])
    if out is not None and tuple(out.shape) != shape:
        raise ValueError(f"out: has shape {tuple(out.shape)}; the product is {shape}")
    dtype = _check(
        _matrix(a),
        _matrix(b),
        None if out is None else _matrix(out),
        None if bias is None else _describe(bias),
        out_dtype,
        accumulate,
        backend,
    )
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
    return _check(
        _describe(a),
        _describe(b),
        None if out is None else _describe(out),
        None if bias is None else _describe(bias),
        out_dtype,
        accumulate,
        backend,
    )


def _check_types(a: Any, b: Any, out: Any, bias: Any) -> None:
    for name, x in (("a", a), ("b", b), ("out", out), ("bias", bias)):
        if not isinstance(x, Tensor) and (x is not None or name in "ab"):
            wanted = _QUANTIZED if name in "ab" else "a torch.Tensor"
            raise TypeError(f"{name}: got {type(x).__name__}; expected {wanted}")


class _Given(NamedTuple):
    """What of an argument decides whether it fits the others."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    format: str | None  # of a ScaledTensor, as what follows
    axis: int | None
    k_grouped: bool


def _describe(x: Tensor) -> _Given:
    if isinstance(x, ScaledTensor):
        return _Given(x.shape, x.dtype, x.device, x.format_name, x.axis, x.k_grouped)
    return _Given(x.shape, x.dtype, x.device, None, None, False)


def _matrix(x: Tensor) -> _Given:
    """Each matrix of a batch."""
    return _describe(x)._replace(shape=x.shape[-2:])


@remembered
def _check(
    a: _Given,
    b: _Given,
    out: _Given | None,
    bias: _Given | None,
    out_dtype: torch.dtype | None,
    accumulate: bool,
    backend: str,
) -> torch.dtype:
    choose("backend", backend, dict.fromkeys(ops.BACKENDS))
    if a.format is not None:
        _check_operand("a", a, -1)
    elif a.dtype != torch.bfloat16:
        raise TypeError(
            f"a: got {a.dtype}; expected {_QUANTIZED}; or a bfloat16 matrix, which is multiplied "
            "as it is: call .bfloat16()"
        )
    _check_operand("b", b, -2)
    _check_pair(a, b)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a, b: got {tuple(a.shape)} @ {tuple(b.shape)}; expected (M, K) @ (K, N)")
    if a.k_grouped or b.k_grouped:
        raise ValueError("a, b: blocks start anew in groups along K; use grouped_gemm")
    m, n = a.shape[0], b.shape[1]
    dtype = out_dtype or (torch.bfloat16 if out is None else out.dtype)
    _check_out_dtype(dtype)
    if out is not None:
        _check_out(out, (m, n), dtype, a.device)
    if accumulate and out is None:
        raise ValueError("accumulate: needs out, the tensor to add to")
    if bias is not None and not bias.dtype.is_floating_point:
        raise TypeError(f"bias: got {bias.dtype}; expected a floating-point tensor ({n},)")
    if bias is not None and (tuple(bias.shape) != (n,) or bias.device != a.device):
        raise ValueError(
            f"bias: got {tuple(bias.shape)} on {bias.device}; expected ({n},) on {a.device}"
        )
    return dtype


def _check_out(
    out: _Given, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    if out.dtype != dtype:
        raise TypeError(f"out: is {out.dtype}, out_dtype asks for {dtype}")
    if tuple(out.shape) != shape:
        raise ValueError(f"out: has shape {tuple(out.shape)}; the product is {shape}")
    if out.device != device:
        raise ValueError(f"out: is on {out.device}, a on {device}; move it there")


def grouped_gemm(
    a: ScaledTensor,
    b: ScaledTensor,
    offsets: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """One product a group (expert), as torch's grouped_mm.

    m_grouped (fprop, dgrad): ``a`` (M, K) whose rows are grouped, ``b`` (G, K, N) -> (M, N), rows
    past the last offset zero. k_grouped (wgrad): ``a`` (M, K) and ``b`` (K, N), both quantized with
    ``offsets`` along K -> (G, M, N).

    >>> ends = torch.tensor([96, 256], dtype=torch.int32)  # rows of two experts
    >>> x, w = torch.randn(256, 512), torch.randn(2, 128, 512)
    >>> bs.grouped_gemm(bs.quantize(x, "mxfp8"), bs.quantize(w, "mxfp8").mT, ends).shape
    torch.Size([256, 128])

    Args:
        a, b: blocked along axes -1 and -2.
        offsets: int32 (G,), on the device of ``a``: the end of each group.
        out_dtype: bfloat16 (default), float16 or float32.
        backend: as of :func:`gemm`; plain torch is all there is yet.

    Raises ValueError or TypeError as :func:`gemm`.
    """
    choose("backend", backend, dict.fromkeys(ops.BACKENDS))
    for name, q, axis in (("a", a, -1), ("b", b, -2)):
        if not isinstance(q, ScaledTensor):
            raise TypeError(f"{name}: got {type(q).__name__}; expected {_QUANTIZED}")
        _check_operand(name, _describe(q), axis)
    _check_pair(_describe(a), _describe(b))
    dtype = out_dtype or torch.bfloat16
    _check_out_dtype(dtype)
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
    left, right = _compact(a), _compact(b)
    return ops.grouped_gemm(*left, *right, offsets, k_grouped, dtype, backend)


def _same(a: Tensor | None, b: Tensor) -> bool:
    if a is b or torch.compiler.is_compiling() or b.device.type != "cpu":
        return True  # reading them would wait for the device
    return a is not None and torch.equal(a, b)


def side(x: Tensor) -> tuple[Any, Any, Any, Any, str, Any]:
    """An operand as the ops take it."""
    if not isinstance(x, ScaledTensor):
        return x, None, None, None, "compact", x.shape
    direct = x.layout_name in _READ and x.offsets is None
    return (
        as_bytes(x.qdata),
        x.qscale if direct else x.compact_bytes(),
        x.global_scale,
        x.format_name,
        x.layout_name if direct else "compact",
        x.shape,
    )


def _compact(q: ScaledTensor) -> tuple[Any, Any, Any, str, Any]:
    """An operand of a grouped product."""
    return as_bytes(q.qdata), q.compact_bytes(), q.global_scale, q.format_name, q.shape


def _check_operand(name: str, q: _Given, axis: int) -> None:
    if q.format is None:
        raise TypeError(f"{name}: got {q.dtype}; expected {_QUANTIZED}")
    if q.axis != axis:
        raise ValueError(
            f"{name}: is blocked along axis {q.axis}, but is contracted along axis {axis}; its "
            "bytes cannot be blocked anew: quantize the high-precision tensor with "
            f"axis={axis}, or pass {name}.mT if its other side is contracted"
        )


def _check_pair(a: _Given, b: _Given) -> None:
    if a.format is not None and b.format is not None:
        x, y = get_format(a.format), get_format(b.format)
        if not x.multiplies(y):
            raise ValueError(
                f"a, b: formats {x.name!r} and {y.name!r} cannot be multiplied: blocks of "
                f"{x.block_size} and {y.block_size} with {x.scale.name} and {y.scale.name} scales; "
                "quantize both alike"
            )
    if a.device != b.device:
        raise ValueError(f"a, b: are on {a.device} and {b.device}; move one of them")


def _check_out_dtype(dtype: torch.dtype) -> None:
    if dtype not in _OUT_DTYPES:
        raise TypeError(f"out_dtype: got {dtype}; choose torch.bfloat16, float16 or float32")
