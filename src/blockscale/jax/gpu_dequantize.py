"""Dequantizing by a kernel: which one, and its arguments."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ..kernels.quantizers.dequantize_config import DequantizeRequest, choose_dequantize, why_not
from ..kernels.quantizers.dequantize_views import View, as_matrices
from ..layouts.base import as_bytes
from .formulas import Stored
from .launch import strides_of
from .target import Target

__all__ = ["decoded", "unsupported"]


def unsupported(scalar: jax.Array | None, stored: Stored) -> str:
    """Why kernels cannot dequantize so; empty where they can."""
    if scalar is not None and scalar.ndim:
        return "global_scale: no kernel takes one for each matrix"
    return why_not(stored.format, stored.layout)


def decoded(
    data: jax.Array,
    scale: jax.Array,
    scalar: jax.Array | None,
    stored: Stored,
    dtype: Any,
    target: Target,
) -> jax.Array:
    """As ``formulas.decoded``, rounded once to ``dtype``."""
    format, layout, turned = stored.format, stored.layout, stored.turned
    shape, axis = stored.lying
    apart = layout == "compact" and turned[0] != turned[1]  # scales lie the other way
    views = as_matrices(_view(data), _view(scale), shape, format, axis == -2, apart)
    assert views is not None  # arrays are contiguous
    read, found, (written, _) = views
    request = DequantizeRequest(
        format.name,
        np.dtype(dtype),
        layout,
        -3 - axis if apart else axis,
        axis == -2,
        scalar is not None,
    )
    config = choose_dequantize(request, (read, found, views[2]), (0, 0, 0), target.gpu)
    (out,) = target.launch(
        config,
        as_bytes(data).reshape(read[0]),
        as_bytes(scale).reshape(found[0]),
        jax.ShapeDtypeStruct(written, np.dtype(dtype)),
        scalar,
    )
    out = out.reshape(shape)
    return out.swapaxes(-1, -2) if turned[0] else out


def _view(x: jax.Array) -> View:
    return x.shape, strides_of(x.shape)
