"""``ScaledArray``: elements and the scales of their blocks, one pytree."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from ..dtypes import FLOAT32
from ..formats import Format, formats
from .dispatch import decoded
from .formulas import FLOATS, Stored

__all__ = ["ScaledArray"]

_STATIC = {"static": True}  # a part of the pytree's structure


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledArray:
    """``element * block_scale * global_scale``; made by :func:`blockscale.jax.quantize`.

    >>> q = bsj.quantize(jnp.ones((256, 512)), "nvfp4")
    >>> q.data.shape, q.scale.shape, q.mT.shape
    ((256, 256), (256, 32), (512, 256))

    A pytree whose leaves are ``data``, ``scale`` and ``global_scale``: jit, vmap, scan and
    checkpoints take it as any other. ``vmap`` maps leading dimensions, as ``axis`` counts from the
    end.

    Attributes:
        data: elements: float8_e4m3fn or float8_e5m2; or bytes, packed along the contraction, of
            four or six bits.
        scale: of each block: float8_e8m0fnu, float8_e4m3fn or float32, as the layout stores them.
        global_scale: float32, what dequantizes: one number, or one for each matrix of a batch;
            None of formats without.
        format: its name.
        axis: of the contraction, -1 or -2.
        layout: of ``scale``, its name.
        length: of the contraction without padding; None where there is none.
        turned: whether ``data`` and ``scale`` are stored with their last two dimensions swapped:
            packed columns lie along the contraction, and a transposed array is not moved.
        dtype: of the values that were quantized.
    """

    data: jax.Array
    scale: jax.Array
    global_scale: jax.Array | None
    format: str = field(metadata=_STATIC)
    axis: int = field(default=-1, metadata=_STATIC)
    layout: str = field(default="compact", metadata=_STATIC)
    length: int | None = field(default=None, metadata=_STATIC)
    turned: tuple[bool, bool] = field(default=(False, False), metadata=_STATIC)
    dtype: Any = field(default=FLOAT32, metadata=_STATIC)

    @property
    def kind(self) -> Format:
        """The format."""
        return formats[self.format]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values, without padding."""
        shape = list(self.data.shape)
        if self.turned[0]:
            shape[-2:] = shape[:-3:-1]
        element = self.kind.element
        shape[self.axis] = self.length or shape[self.axis] * 8 // element.bits
        return tuple(shape)

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def mT(self) -> ScaledArray:
        """The transposed matrix, or those of a batch: nothing is moved."""
        data, scale = self.turned
        turned = not data, not scale if self.layout == "compact" else scale
        return replace(self, axis=-3 - self.axis, turned=turned)

    def dequantize(self, dtype: Any = None) -> jax.Array:
        """``(element * block_scale) * global_scale``, each product rounded once to fp32, then to
        ``dtype``, by default that of what was quantized."""
        how = Stored(self.kind, self.axis, self.layout, self.shape, self.turned)
        rounded = jnp.dtype(self.dtype if dtype is None else dtype)
        exact = rounded if rounded.name in FLOATS else FLOAT32
        return decoded(self.data, self.scale, self.global_scale, how, exact).astype(rounded)

    def __repr__(self) -> str:
        return f"ScaledArray({self.format}, shape={self.shape}, axis={self.axis}, {self.dtype})"
