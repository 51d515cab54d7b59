"""What is done with the accumulator of a product before it is stored."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...dtypes import BFLOAT16, FLOAT16, FLOAT32

__all__ = ["OUT_DTYPES", "Epilogue"]

OUT_DTYPES = (BFLOAT16, FLOAT16, FLOAT32)


class Epilogue(NamedTuple):
    """Fields that configurations of products have in common.

    Attributes:
        out_dtype: bfloat16, float16 or float32.
        accumulate: add to the output.
        bias: the dtype of a vector that is added to each row, if there is one.
        alpha: what the accumulator is multiplied by, two at most: 0 for a scalar, 1 for a vector
            that has one for each group.
        tma_store: the output starts, and each of its rows starts and ends, at a multiple of 16
            bytes: TMA can store it.
    """

    out_dtype: np.dtype = BFLOAT16
    accumulate: bool = False
    bias: np.dtype | None = None
    alpha: tuple[int, ...] = ()
    tma_store: bool = True
