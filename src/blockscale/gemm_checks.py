"""Whether the arguments of a product belong together; what is said where they do not."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import ops
from .checks import check_offsets, choose
from .formats import get_format
from .remember import remembered
from .tensor import ScaledTensor

__all__ = ["check_batch", "check_grouped", "check_product"]

_QUANTIZED = "a ScaledTensor: call blockscale.quantize"
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
    shape = (*lead, a.shape[-2], b.shape[-1])
    if out is not None and tuple(out.shape) != shape:
        raise ValueError(f"out: has shape {tuple(out.shape)}; the product is {shape}")
    return _check(
        _matrix(a),
        _matrix(b),
        None if out is None else _matrix(out),
        None if bias is None else _describe(bias),
        out_dtype,
        accumulate,
        backend,
    )


def check_grouped(
    a: Any, b: Any, offsets: Tensor, out_dtype: torch.dtype | None, backend: str
) -> tuple[torch.dtype, bool]:
    """The type of the product of ``grouped_gemm``, and whether K is grouped; raises as it does."""
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
    return dtype, k_grouped


def _same(a: Tensor | None, b: Tensor) -> bool:
    if a is b or torch.compiler.is_compiling() or b.device.type != "cpu":
        return True  # reading them would wait for the device
    return a is not None and torch.equal(a, b)


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
