"""Checks of tensors that several calls take."""

from __future__ import annotations

import os
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

__all__ = [
    "DTYPES",
    "VALUE_DTYPES",
    "check_counts",
    "check_gather",
    "check_is_tensor",
    "check_offsets",
    "check_shape",
    "check_value_dtype",
    "checks_values",
    "is_looked_at",
]

#: Of what is quantized, and of products.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Of what a quantized tensor stands for.
VALUE_DTYPES = (*DTYPES, torch.float64)


def check_is_tensor(name: str, given: object) -> None:
    """TypeError unless it is a tensor, of whatever kind."""
    if not isinstance(given, Tensor):
        raise TypeError(f"{name}: got {type(given).__name__}; expected a torch.Tensor")


def check_value_dtype(dtype: torch.dtype) -> None:
    """TypeError unless a quantized tensor can stand for values of ``dtype``."""
    if dtype not in VALUE_DTYPES:
        raise TypeError(
            f"dtype: got {dtype}, and a ScaledTensor stands for floating-point values; choose "
            "torch.float32, bfloat16, float16 or float64"
        )


def check_shape(shape: object) -> None:
    """TypeError unless it is the shape of a tensor."""
    if isinstance(shape, torch.Size):
        return
    sizes = isinstance(shape, tuple | list) and all(hasattr(n, "__index__") for n in shape)
    if not sizes or any(isinstance(n, int) and n < 0 for n in shape):  # type: ignore[attr-defined]
        raise TypeError(f"shape: got {shape!r}; expected the sizes of a tensor, as (256, 512)")


def check_offsets(offsets: Tensor, rows: int, device: torch.device) -> None:
    """Raise unless ``offsets`` are ascending int32 ends of groups, at most ``rows``.

    Their values are looked at only on a CPU: elsewhere that would wait for the device, which
    ``BLOCKSCALE_CHECK_OFFSETS=1`` does.
    """
    _check_groups("offsets", "the end of each group", offsets, device)
    if not is_looked_at(offsets):
        return
    ends = [0, *offsets.tolist()]
    if any(end < start for start, end in pairwise(ends)) or ends[-1] > rows:
        raise ValueError(f"offsets: got {ends[1:]}; expected ascending ends, at most {rows}")


def check_counts(counts: Tensor, capacity: int, device: torch.device) -> None:
    """The same of ``counts``: how many rows each group has, at most ``capacity``."""
    _check_groups("counts", "how many rows each group has", counts, device)
    if not is_looked_at(counts):
        return
    rows = counts.tolist()
    if min(rows) < 0 or max(rows) > capacity:
        raise ValueError(
            f"counts: got {rows}; expected 0 to {capacity} rows, which a group has room for: give "
            "it more, or drop rows"
        )


def check_gather(gather: Tensor, x: Tensor) -> None:
    """Raise unless ``gather`` names rows of the matrix ``x``; on a GPU its values are not looked
    at."""
    _check_indices("gather", "the rows of x to be quantized (Routing.tokens)", gather)
    if x.dim() != 2:
        raise ValueError(
            f"gather: x has shape {tuple(x.shape)}; only rows of a matrix are gathered"
        )
    if gather.device != x.device:
        raise ValueError(f"gather: is on {gather.device}, x on {x.device}; move it there")
    if not gather.is_contiguous():
        raise ValueError(f"gather: has stride {gather.stride()}; call contiguous()")
    if is_looked_at(gather) and len(gather):
        low, high = int(gather.min()), int(gather.max())
        if low < 0 or high >= len(x):
            raise ValueError(
                f"gather: got rows {low} to {high}; expected rows of x, from 0 to {len(x) - 1}"
            )


def _check_indices(name: str, meaning: str, given: object) -> None:
    """TypeError unless it is an int32 vector."""
    if not isinstance(given, Tensor) or given.dtype != torch.int32 or given.dim() != 1:
        kind = type(given).__name__
        if isinstance(given, Tensor):
            kind = f"{given.dtype} of {given.dim()} dimension(s)"
        raise TypeError(
            f"{name}: got {kind}; expected a torch.int32 tensor of one dimension, {meaning}"
        )


def _check_groups(name: str, meaning: str, given: Tensor, device: torch.device) -> None:
    _check_indices(name, meaning, given)
    if not len(given):
        raise ValueError(f"{name}: is empty; expected {meaning}, of one at least")
    if given.device != device:
        raise ValueError(f"{name}: is on {given.device}, the data on {device}; move it there")


def is_looked_at(given: Tensor) -> bool:
    """Whether its values are: on a CPU, or where the environment asks for it. In torch.vmap there
    are several."""
    if torch.compiler.is_compiling() or torch._C._functorch.is_batchedtensor(given):
        return False
    return given.device.type == "cpu" or checks_values()


@cache
def checks_values() -> bool:
    """Whether offsets and counts on a GPU are looked at: as the environment says at the first call,
    for to ask it takes the host a microsecond."""
    return os.environ.get("BLOCKSCALE_CHECK_OFFSETS", "") not in ("", "0")
