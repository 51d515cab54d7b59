"""Checks of a product's call that its architecture does not change, and what needs no kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from .runtime import Described, Unsupported, describe

__all__ = [
    "OUT_DTYPES",
    "Alpha",
    "aligned_rows",
    "check_loadable",
    "check_matrix",
    "check_rest",
    "describe_alpha",
    "sum_of_nothing",
]

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: What sums are multiplied by: () fp32; or two of these, whose product it is.
Alpha = Tensor | tuple[Tensor, Tensor] | None


def describe_alpha(alpha: Alpha) -> tuple[Described, ...]:
    """What of each scalar decides which kernel takes it."""
    if alpha is None:
        return ()
    return tuple(describe(x) for x in (alpha if isinstance(alpha, tuple) else (alpha,)))


def check_rest(
    shape: tuple[int, int],
    out: Described | None,
    bias: Described | None,
    alpha: tuple[Described, ...],
    out_dtype: torch.dtype,
    accumulate: bool,
) -> None:
    """Raise unless the other arguments fit a product of ``shape``."""
    _check_vector("bias", bias, shape[1:], OUT_DTYPES)
    for scalar in alpha:
        _check_vector("alpha", scalar, (), (torch.float32,))
    if accumulate and out is None:
        raise ValueError("accumulate: needs c, the tensor to add to")
    if out is not None:
        check_matrix("c", out, (out_dtype,))
        if tuple(out[0]) != shape:
            raise ValueError(f"c: has shape {tuple(out[0])}; the product is {shape}")


def check_loadable(**operands: Described) -> None:
    """Unsupported where TMA cannot load one."""
    for name, (_, stride, dtype, address) in operands.items():
        if address or stride[0] * dtype.itemsize % 16:
            raise Unsupported(f"{name}: TMA wants rows that start at a multiple of 16 bytes")


def sum_of_nothing(out: Tensor, bias: Tensor | None, accumulate: bool) -> Tensor:
    """``out``, as a product without a kernel leaves it."""
    if not accumulate:
        out.zero_()
    return out if bias is None else out.add_(bias)


def aligned_rows(n: int, out: Described | None, dtype: torch.dtype) -> bool:
    """Whether TMA can store the output: it writes whole groups of 16 bytes of a row."""
    apart, address = (n, 0) if out is None else (out[1][0], out[3])
    return not (address or apart * dtype.itemsize % 16 or n * dtype.itemsize % 16)


def check_matrix(name: str, x: Described, dtypes: tuple[torch.dtype, ...]) -> None:
    shape, stride, dtype, _ = x
    if dtype not in dtypes:
        raise TypeError(f"{name}: got {dtype}; expected {' or '.join(map(str, dtypes))}")
    if len(shape) != 2:
        raise ValueError(f"{name}: has shape {tuple(shape)}; expected a matrix")
    if stride[1] != 1 and shape[1] > 1:
        raise ValueError(
            f"{name}: has strides {stride}; its last dimension must lie together: call contiguous()"
        )


def _check_vector(
    name: str, x: Described | None, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    if x is None:
        return
    if x[2] not in dtypes:
        raise TypeError(f"{name}: got {x[2]}; expected {' or '.join(map(str, dtypes))}")
    if tuple(x[0]) != shape or (shape > (1,) and x[1] != (1,)):
        raise ValueError(
            f"{name}: has shape {tuple(x[0])} and strides {x[1]}; expected {shape}, contiguous"
        )
