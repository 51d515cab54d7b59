"""What a scale layout is: a small frozen value that places scale (row, block) in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..arrays import Array, bits_as, fresh, zero_padded
from ..dtypes import UINT8, to_torch

__all__ = ["Layout", "as_bytes", "ceil_to", "check_scale"]


def ceil_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def as_bytes(scale: Array) -> Array:
    """One-byte float dtypes as uint8, for which every operation exists."""
    return bits_as(scale, UINT8) if scale.dtype.itemsize == 1 else scale


@dataclass(frozen=True)
class Layout:
    """Base of the layouts. Scales go in and come out as a matrix (rows, blocks).

    ``rows`` counts what is not contracted (rows of A, columns of B), ``blocks`` runs along the
    contraction: a tensor blocked along axis -2 passes its compact scales transposed. Padding is
    always zero, never NaN: 0 * NaN would poison an accumulator. Arrays are torch's, numpy's or
    JAX's, and so are dtypes.

    All of a layout is data: the matrix is padded to multiples of ``rows`` and ``blocks``, both
    dimensions are cut into these factors, and two axes of the result change places.
    """

    name: ClassVar[str]
    itemsize: ClassVar[tuple[int, ...]]  # bytes of the scales that it can hold
    rows: ClassVar[tuple[int, ...]] = ()  # a row's index is cut into these, the last one innermost
    blocks: ClassVar[tuple[int, ...]] = ()
    pad: ClassVar[tuple[int, int]] = (1, 1)  # to multiples of these
    swapped: ClassVar[tuple[int, int]] = (0, 0)
    flat: ClassVar[bool] = False  # stored with one dimension
    spreads: ClassVar[bool] = True  # groups of rows, as ``Grouped`` does; else they stay together
    word: ClassVar[np.dtype | None] = None  # that holds the scales of the innermost axis
    sentence: ClassVar[str]

    def swizzle(self, scale: Array) -> Array:
        """Store a (rows, blocks) matrix of scales. Raises ValueError for a dtype or rank misfit."""
        check_scale(self, scale)
        shape = tuple(scale.shape)
        octets = zero_padded(as_bytes(scale), *self._padded(shape))
        stored = fresh(octets.reshape(self._cut(shape)).swapaxes(*self.swapped))
        if self.word is not None:
            stored = bits_as(stored, self.word)
        return stored.reshape(self.stored_shape(shape)).view(self.stored_dtype(scale.dtype))

    def unswizzle(self, stored: Array, shape: tuple[int, int], dtype: Any) -> Array:
        """The (rows, blocks) matrix back, as ``dtype``. Raises ValueError for a wrong size."""
        self._check_stored(stored, shape, dtype)
        cut = list(self._cut(shape))
        i, j = self.swapped
        cut[i], cut[j] = cut[j], cut[i]
        octets = stored if self.word is None else bits_as(stored, UINT8)
        matrix = as_bytes(octets).reshape(cut).swapaxes(i, j).reshape(self._padded(shape))
        return fresh(matrix[: shape[0], : shape[1]]).view(dtype)

    def stored_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Shape of the stored tensor for ``shape`` = (rows, blocks)."""
        cut = list(self._cut(shape))
        i, j = self.swapped
        cut[i], cut[j] = cut[j], cut[i]
        if self.flat:
            return (math.prod(cut),)
        return tuple(cut if self.word is None else cut[:-1])

    def stored_dtype(self, dtype: Any) -> Any:
        """dtype of the stored tensor for scales of ``dtype``."""
        if self.word is None:
            return dtype
        return self.word if isinstance(dtype, np.dtype) else to_torch(self.word)

    def nbytes(self, shape: tuple[int, int], itemsize: int | None = None) -> int:
        """Bytes of the stored tensor; ``itemsize`` of a scale where the layout holds several."""
        return math.prod(self._padded(shape)) * (itemsize or self.itemsize[0])

    def offset(
        self, row: int, block: int, shape: tuple[int, int], itemsize: int | None = None
    ) -> int:
        """Byte offset of scale (row, block) in the stored tensor."""
        cut, index = list(self._cut(shape)), _digits(row, self.rows) + _digits(block, self.blocks)
        i, j = self.swapped
        cut[i], cut[j], index[i], index[j] = cut[j], cut[i], index[j], index[i]
        item = 0
        for n, at in zip(cut, index, strict=True):
            item = item * n + at
        return item * (itemsize or self.itemsize[0])

    def describe(self) -> str:
        """One sentence for a person."""
        return self.sentence

    def _padded(self, shape: tuple[int, int]) -> tuple[int, int]:
        return ceil_to(shape[0], self.pad[0]), ceil_to(shape[1], self.pad[1])

    def _cut(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Shape of the padded matrix with both dimensions cut into their factors."""
        rows, blocks = self._padded(shape)
        down, across = math.prod(self.rows), math.prod(self.blocks)
        return (rows // down, *self.rows, blocks // across, *self.blocks)

    def _check_stored(self, stored: Array, shape: tuple[int, int], dtype: Any) -> None:
        want = self.stored_shape(shape), self.stored_dtype(dtype)
        if (tuple(stored.shape), stored.dtype) != want:
            raise ValueError(
                f"scale: got {tuple(stored.shape)} {stored.dtype}; layout {self.name!r} stores "
                f"{shape[0]} x {shape[1]} scales as {want[0]} {want[1]}"
            )


def _digits(n: int, factors: tuple[int, ...]) -> list[int]:
    """An index in mixed radix, the outermost digit first."""
    found: list[int] = []
    for factor in reversed(factors):
        n, digit = divmod(n, factor)
        found.append(digit)
    return [n, *reversed(found)]


def check_scale(layout: Layout, scale: Array) -> None:
    """Raise unless ``scale`` is a matrix of items that ``layout`` can hold."""
    if scale.ndim != 2:
        raise ValueError(
            f"scale: got {scale.ndim} dimensions; layout {layout.name!r} takes a matrix (rows, "
            "blocks): flatten leading dimensions into the rows first"
        )
    if not getattr(scale.dtype, "isnative", True):
        raise TypeError(
            f"scale: got {scale.dtype}, of another byte order; pass scale.astype('=f4')"
        )
    if scale.dtype.itemsize not in layout.itemsize:
        kinds = {1: "one-byte scales (E8M0, UE4M3)", 4: "fp32 scales"}
        held = " and ".join(kinds[size] for size in layout.itemsize)
        raise ValueError(f"scale: got {scale.dtype}; layout {layout.name!r} holds {held}")
