"""What formulas ask of an array, be it torch's, numpy's or JAX's: words of the array API standard.

Nothing here imports torch: a tensor's own methods are called.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Array", "bits_as", "device_of", "fresh", "namespace", "row_major", "zero_padded"]

#: A torch.Tensor, a numpy.ndarray or a jax.Array.
Array = Any


def namespace(x: Array) -> Any:
    """The functions of the library that ``x`` comes from, as the array API standard names them.

    Example: ``namespace(x).where(x > 0, x, 0)``. Source: https://data-apis.org/array-api.
    """
    if hasattr(x, "__array_namespace__"):  # numpy's and JAX's arrays
        return x.__array_namespace__()
    if not hasattr(x, "dtype"):
        raise TypeError(
            f"got a {type(x).__name__}; expected a torch.Tensor, a numpy.ndarray or a jax.Array"
        )
    import array_api_compat.torch

    return array_api_compat.torch


def bits_as(x: Array, dtype: np.dtype) -> Array:
    """The same bits as items of another dtype of as many bytes, or of fewer."""
    return x.view(getattr(namespace(x), dtype.name, dtype))


def device_of(x: Array) -> Any:
    """The device that holds ``x``; None where JAX only traces it."""
    return getattr(x, "device", None)


def row_major(x: Array) -> Array:
    """The same items, in memory row by row: itself where they lie so."""
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x)
    return x.contiguous() if hasattr(x, "contiguous") else x  # JAX's have no other order


def fresh(x: Array) -> Array:
    """A copy in memory of its own, row by row."""
    xp = namespace(x)
    return x.clone(memory_format=xp.contiguous_format) if hasattr(x, "clone") else x.copy()


def zero_padded(x: Array, rows: int, columns: int) -> Array:
    """A matrix with rows and columns of zeros after its own, up to so many."""
    xp = namespace(x)
    for axis, missing in enumerate((rows - x.shape[0], columns - x.shape[1])):
        if missing:
            shape = (missing, x.shape[1]) if axis == 0 else (x.shape[0], missing)
            zeros = xp.zeros(shape, dtype=x.dtype, device=device_of(x))
            x = xp.concat([x, zeros], axis=axis)
    return x
