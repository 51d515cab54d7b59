"""Checks of arguments that several calls take."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["DTYPES", "VALUE_DTYPES", "check_axis", "check_flag", "check_offsets", "choose"]

#: Of what is quantized, and of products.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Of what a quantized tensor stands for.
VALUE_DTYPES = (*DTYPES, torch.float64)

_AXES = {"-1": -1, "-2": -2}

T = TypeVar("T")


def check_flag(name: str, value: object) -> None:
    """TypeError unless it is True or False."""
    if value is not True and value is not False:
        raise TypeError(f"{name}: got {value!r}; expected True or False")


def choose(what: str, given: object, known: Mapping[str, T]) -> T:
    """``known[given]``, or a ValueError that names the argument and lists what it may be."""
    try:
        return known[given]  # type: ignore[index]
    except (KeyError, TypeError):
        names = ", ".join(repr(k) for k in known)
        raise ValueError(f"{what}: got {given!r}; choose one of {names}") from None


def check_axis(axis: int) -> int:
    """-1 or -2; anything else is a ValueError."""
    return choose("axis (of the contraction, counted from the end)", str(axis), _AXES)


def check_offsets(offsets: Tensor, rows: int, device: torch.device) -> None:
    """Raise unless ``offsets`` are ascending int32 ends of groups, at most ``rows``.

    Their values are looked at only on a CPU: elsewhere that would wait for the device.
    """
    if not isinstance(offsets, Tensor) or offsets.dtype != torch.int32 or offsets.dim() != 1:
        raise TypeError("offsets: expected an int32 tensor of one dimension, the end of each group")
    if not len(offsets):
        raise ValueError("offsets: is empty; expected the end of at least one group")
    if offsets.device != device:
        raise ValueError(f"offsets: is on {offsets.device}, the data on {device}; move it there")
    if torch.compiler.is_compiling() or offsets.device.type != "cpu":
        return
    ends = [0, *offsets.tolist()]
    if any(end < start for start, end in pairwise(ends)) or ends[-1] > rows:
        raise ValueError(f"offsets: got {ends[1:]}; expected ascending ends, at most {rows}")
