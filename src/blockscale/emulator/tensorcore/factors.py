"""The operands of a product: elements decoded and scaled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .elements import NO_EXPONENT, decode

__all__ = ["Factors", "factors"]


@dataclass(frozen=True, slots=True)
class Factors:
    values: np.ndarray  # (..., rows, K) float64, scaled
    exponents: np.ndarray  # (..., rows, K) float32: what the terms are aligned by


def factors(
    codes: np.ndarray, type: str, scales: np.ndarray | None, scale_type: str, of_scales: bool
) -> Factors:
    """``codes`` (..., rows, K) with ``scales`` (..., rows, K / vector), if any.

    of_scales: terms are aligned by the exponents of the scales alone.
    """
    values, exponents = decode(codes, type)
    if scales is not None:
        scale, more = decode(scales, scale_type)
        blocks = (*scales.shape, codes.shape[-1] // scales.shape[-1])
        values = (values.reshape(blocks) * scale[..., None]).reshape(values.shape)
        more = np.broadcast_to(more[..., None], blocks).reshape(values.shape)
        if of_scales:
            exponents = np.where(exponents == NO_EXPONENT, exponents, more)
        else:
            exponents = exponents + more
    return Factors(values, exponents.astype(np.float32))
