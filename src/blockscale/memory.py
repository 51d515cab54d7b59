"""A tensor's bytes: as a tensor, and as a numpy array without torch's bridge.

``Tensor.numpy()`` marks the storage as one that can never be resized again, and FSDP resizes those
of parameters. So compiled loops and files get at memory by its address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

__all__ = ["as_bytes", "joined", "memory_of"]


def as_bytes(x: Tensor) -> Tensor:
    """One-byte float dtypes as uint8, for which every torch operation exists."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def joined(join: Callable[..., Tensor], parts: Sequence[Tensor], back: int) -> Tensor:
    """``torch.cat`` or ``torch.stack``, along a dimension counted from the end, of what may be
    float8; where the last but one dimension is contiguous, it stays so."""
    dtype, octets = parts[0].dtype, [as_bytes(part) for part in parts]
    column_major = all(part.stride(-1) != 1 and part.stride(-2) == 1 for part in parts)
    if not column_major:
        return join(octets, back).view(dtype)
    other = {-1: -2, -2: -1}.get(back, back)
    return join([part.mT for part in octets], other).mT.view(dtype)


# Of a size that no array exceeds: to make a type for each size would take longer than a call.
class _Memory(ctypes.c_char * (2**62)):  # type: ignore[misc]
    __slots__ = ("owner",)


def memory_of(x: Tensor, dtype: DTypeLike, count: int) -> np.ndarray:
    """``count`` items of ``dtype`` from the first element of ``x`` (on a CPU) on, not copied.

    The array keeps the tensor alive; resizing the storage while the array is in use is an error
    that nobody sees.

    >>> x = torch.ones(3)
    >>> memory_of(x, np.int32, x.numel()).tolist()
    [1065353216, 1065353216, 1065353216]

    Raises ValueError where there is no memory.
    """
    x = x.resolve_neg()  # else a lazily negated tensor's memory has the other sign
    address = x.data_ptr()
    if count and not address:  # numpy would take other memory
        raise ValueError(
            f"x: the memory of this {tuple(x.shape)} tensor was freed (FSDP frees the weights that "
            "it gathered): use it before that"
        )
    memory = _Memory.from_address(address)
    memory.owner = x
    return np.frombuffer(memory, dtype, count)
