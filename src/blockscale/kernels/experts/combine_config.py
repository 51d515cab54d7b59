"""What to compile for a combine: a pure function of shapes and types, and its result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..common.gpu import Gpu

__all__ = ["CombineConfig", "choose_combine"]

_THREADS = 256  # of a CTA, at most
_CHUNKS = (8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class CombineConfig:
    """A kernel: all that its code depends on.

    Attributes:
        dtype, out_dtype: of rows, and of what tokens get.
        weighted: rows have weights.
        index_bytes: of a slot: 4 or 8.
        chunk: rows that are loaded at once.
        threads: of a CTA, each of which has 16 bytes of a token's rows.
    """

    arch: str
    dtype: np.dtype
    out_dtype: np.dtype
    weighted: bool
    index_bytes: int
    chunk: int
    threads: int

    @property
    def vector(self) -> int:
        """Columns of a thread."""
        return 16 // self.dtype.itemsize


def choose_combine(
    columns: int,
    top_k: int,
    dtypes: tuple[np.dtype, np.dtype],
    weighted: bool,
    index_bytes: int,
    gpu: Gpu,
) -> CombineConfig:
    """The kernel for rows of ``columns``, of which each token has ``top_k``."""
    vectors = columns * dtypes[0].itemsize // 16
    return CombineConfig(
        arch=gpu.arch,
        dtype=dtypes[0],
        out_dtype=dtypes[1],
        weighted=weighted,
        index_bytes=index_bytes,
        chunk=next(n for n in _CHUNKS if top_k % n == 0),
        threads=min(_THREADS, -(-vectors // 32) * 32),
    )
