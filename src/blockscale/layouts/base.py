"""What a scale layout is: a small frozen value that places scale (row, block) in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["Layout", "as_bytes", "ceil_to", "check_scale"]


def ceil_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def as_bytes(scale: Tensor) -> Tensor:
    """One-byte float dtypes as uint8, for which every torch operation exists."""
    return scale.view(torch.uint8) if scale.dtype.itemsize == 1 else scale


@dataclass(frozen=True)
class Layout:
    """Base of the layouts. Scales go in and come out as a matrix (rows, blocks).

    ``rows`` counts what is not contracted (rows of A, columns of B), ``blocks`` runs along the
    contraction: a tensor blocked along axis -2 passes its compact scales transposed. Padding is
    always zero, never NaN: 0 * NaN would poison an accumulator.
    """

    name: ClassVar[str]
    itemsize: ClassVar[tuple[int, ...]]  # bytes of the scales that it can hold

    def swizzle(self, scale: Tensor) -> Tensor:
        """Store a (rows, blocks) matrix of scales. Raises ValueError for a dtype or rank misfit."""
        raise NotImplementedError

    def unswizzle(self, stored: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The (rows, blocks) matrix back, as ``dtype``. Raises ValueError for a wrong size."""
        raise NotImplementedError

    def stored_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Shape of the stored tensor for ``shape`` = (rows, blocks)."""
        raise NotImplementedError

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """dtype of the stored tensor for scales of ``dtype``."""
        return dtype

    def nbytes(self, shape: tuple[int, int], itemsize: int | None = None) -> int:
        """Bytes of the stored tensor; ``itemsize`` of a scale where the layout holds several."""
        raise NotImplementedError

    def offset(
        self, row: int, block: int, shape: tuple[int, int], itemsize: int | None = None
    ) -> int:
        """Byte offset of scale (row, block) in the stored tensor."""
        raise NotImplementedError

    def describe(self) -> str:
        """One sentence for a person."""
        raise NotImplementedError

    def _check_stored(self, stored: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
        want = self.stored_shape(shape), self.stored_dtype(dtype)
        if (tuple(stored.shape), stored.dtype) != want:
            raise ValueError(
                f"scale: got {tuple(stored.shape)} {stored.dtype}; layout {self.name!r} stores "
                f"{shape[0]} x {shape[1]} scales as {want[0]} {want[1]}"
            )


def check_scale(layout: Layout, scale: Tensor) -> None:
    """Raise ValueError unless ``scale`` is a matrix of a size that ``layout`` can hold."""
    if scale.ndim != 2:
        raise ValueError(
            f"scale: got {scale.ndim} dimensions; layout {layout.name!r} takes a matrix (rows, "
            "blocks): flatten leading dimensions into the rows first"
        )
    if scale.dtype.itemsize not in layout.itemsize:
        kinds = {1: "one-byte scales (E8M0, UE4M3)", 4: "fp32 scales"}
        held = " and ".join(kinds[size] for size in layout.itemsize)
        raise ValueError(f"scale: got {scale.dtype}; layout {layout.name!r} holds {held}")
