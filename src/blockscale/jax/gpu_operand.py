"""Operands of products as kernels take them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..dtypes import BFLOAT16
from ..formats import Format
from ..layouts import get_layout
from ..layouts.base import as_bytes
from ..layouts.scales import unswizzle_scale
from . import gpu_dequantize
from .array import ScaledArray
from .formulas import Stored
from .target import Target

__all__ = ["Operand", "alpha_of"]


class Operand(NamedTuple):
    """A matrix, or one for each group, whose contraction comes last.

    Attributes:
        data: (..., rows, bytes), or bf16.
        scale: (..., rows, blocks), or as ``layout`` stores it; None of bf16.
        scalar: the global scale, of formats that have one.
        format: None of bf16.
        turned: compact scales lie (..., blocks, rows).
    """

    data: jax.Array
    scale: jax.Array | None
    scalar: jax.Array | None
    format: Format | None
    layout: str
    turned: bool = False

    @classmethod
    def of(cls, x: ScaledArray | jax.Array, axis: int) -> Operand:
        """The operand of an array whose contraction is ``axis``."""
        if not isinstance(x, ScaledArray):
            return cls(x, None, None, None, "compact")
        data = x.data if x.turned[0] == (axis == -2) else x.data.swapaxes(-1, -2)
        turned = x.layout == "compact" and x.turned[1] != (axis == -2)
        return cls(as_bytes(data), as_bytes(x.scale), x.global_scale, x.kind, x.layout, turned)

    @property
    def name(self) -> str | None:
        return None if self.format is None else self.format.name

    @property
    def k(self) -> int:
        """With padding."""
        columns = self.data.shape[-1]
        return columns if self.format is None else self.format.element.elements(columns)

    def compact(self) -> jax.Array:
        """Scales (..., rows, blocks)."""
        assert self.format is not None
        assert self.scale is not None
        if self.layout == "compact":
            return self.scale.swapaxes(-1, -2) if self.turned else self.scale
        shape = -(-self.data.shape[-2] // self.format.block[0]), -(-self.k // self.format.block[1])
        layout, dtype = get_layout(self.layout), self.format.scale.numpy_dtype
        stored = self.scale.view(layout.stored_dtype(dtype))
        return as_bytes(unswizzle_scale(stored, -1, layout, shape, dtype, None))

    def by_rows(self) -> jax.Array:
        """fp32 scales of each row, in layout "sm90"."""
        assert self.format is not None
        assert self.scale is not None
        rows = self.format.block[0]
        if self.layout == "sm90" and rows == 1:
            return self.scale
        return get_layout("sm90").swizzle(
            jnp.repeat(self.compact(), rows, -2)[: self.data.shape[-2]]
        )

    def values(self, target: Target) -> jax.Array:
        """bf16 of whole blocks, without the global scale."""
        if self.format is None:
            return self.data
        assert self.scale is not None
        shape = self.data.shape[-2], self.k
        stored = Stored(self.format, -1, "compact", shape, (False, self.turned))
        data = self.data.view(self.format.element.numpy_dtype)
        scale = self.scale if self.turned else self.compact()
        return gpu_dequantize.decoded(data, scale, None, stored, BFLOAT16, target)


def alpha_of(a: Operand, b: Operand) -> tuple[Any, tuple[int, ...]]:
    """The global scales that accumulators are multiplied by, as kernels take them, and the rank of
    each."""
    found = [x.scalar for x in (a, b) if x.scalar is not None]
    alpha = None if not found else found[0] if len(found) == 1 else tuple(found)
    return alpha, tuple(each.ndim for each in found)
