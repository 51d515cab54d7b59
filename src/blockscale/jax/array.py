"""``ScaledArray``: elements and the scales of their blocks, one pytree."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from ..dtypes import FLOAT32
from ..formats import Format, formats
from ..layouts import get_layout
from .dispatch import decoded
from .formulas import FLOATS, Stored
from .groups import moved_apart, moved_back, read

__all__ = ["ScaledArray"]

_STATIC = {"static": True}  # a part of the pytree's structure


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledArray:
    """``element * block_scale * global_scale``; made by :func:`blockscale.jax.quantize`.

    >>> q = bsj.quantize(jnp.ones((256, 512)), "nvfp4")
    >>> q.data.shape, q.scale.shape, q.mT.shape
    ((256, 256), (256, 32), (512, 256))

    A pytree whose leaves are ``data``, ``scale``, ``global_scale`` and ``offsets``: jit, vmap, scan
    and checkpoints take it as any other. ``vmap`` maps leading dimensions, as ``axis`` counts from
    the end.

    Attributes:
        data: elements: float8_e4m3fn or float8_e5m2; or bytes, packed along the contraction, of
            four or six bits.
        scale: of each block: float8_e8m0fnu, float8_e4m3fn or float32, as the layout stores them.
        global_scale: float32, what dequantizes: one number, or one for each matrix of a batch;
            None of formats without.
        format: its name.
        axis: of the contraction, -1 or -2.
        layout: of ``scale``, its name.
        length: of the contraction without padding, or room between groups; None where there is
            none.
        turned: whether ``data`` and ``scale`` are stored with their last two dimensions swapped:
            packed columns lie along the contraction, and a transposed array is not moved.
        dtype: of the values that were quantized.
        offsets: int32 (groups,), the end of each group; None without groups.
        k_grouped: groups are of the contraction, blocks start anew in each, and data is moved
            apart where ``length`` is not None (docs/layouts.md); else they are of what is not
            contracted, and layouts of tiles start each on one of its own.
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
    offsets: jax.Array | None = None
    k_grouped: bool = field(default=False, metadata=_STATIC)

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

    @property
    def _mapped(self) -> bool:
        """Whether vmap made this batch, of what is a matrix else."""
        grouped = self.offsets is not None and self.offsets.ndim > 1
        return grouped or (self.layout != "compact" and self.ndim > 2)

    def dequantize(self, dtype: Any = None) -> jax.Array:
        """``(element * block_scale) * global_scale``, each product rounded once to fp32, then to
        ``dtype``, by default that of what was quantized."""
        if self._mapped:
            return jax.vmap(lambda q: q.dequantize(dtype))(self)
        if self.offsets is not None:
            values = self.ungrouped().dequantize(dtype)
            if not self.k_grouped:
                return values
            return moved_back(values, self.offsets, self.shape[self.axis], self.axis)
        how = Stored(self.kind, self.axis, self.layout, self.shape, self.turned)
        rounded = jnp.dtype(self.dtype if dtype is None else dtype)
        exact = rounded if rounded.name in FLOATS else FLOAT32
        return decoded(self.data, self.scale, self.global_scale, how, exact).astype(rounded)

    def ungrouped(self) -> ScaledArray:
        """The same elements and scales without groups: groups along the contraction stay apart,
        with zeros between them, which make it longer; scales of groups of rows are compact."""
        if self.offsets is None:
            return self
        if self._mapped:
            return jax.vmap(ScaledArray.ungrouped)(self)
        plain, layout = replace(self, offsets=None, k_grouped=False), get_layout(self.layout)
        if self.k_grouped and self.length is not None:
            return replace(plain, length=None)
        if self.k_grouped:
            axis = -3 - self.axis if self.turned[0] else self.axis
            return replace(plain, data=moved_apart(self.data, self.offsets, axis))
        if not layout.spreads:
            return plain
        shape = self.kind.scale_shape(self.shape, self.axis)
        like = jax.ShapeDtypeStruct(shape, self.kind.scale.numpy_dtype)
        scale = read(self.scale, self.axis, layout, like, self.offsets)
        return replace(plain, scale=scale, layout="compact")

    def __repr__(self) -> str:
        grouped = "" if self.offsets is None else f", groups={self.offsets.shape[-1]}"
        kept = f"shape={self.shape}, axis={self.axis}, {self.dtype}{grouped}"
        return f"ScaledArray({self.format}, {kept})"
