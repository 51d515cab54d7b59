"""To and from torch's ScaledTensor, by DLPack: the same memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..dtypes import UINT8
from ..dtypes import from_torch as numpy_dtype
from ..dtypes import to_torch as torch_dtype
from ..layouts import get_layout
from .array import ScaledArray
from .checks import check_scaled

if TYPE_CHECKING:
    from ..tensor import ScaledTensor

__all__ = ["from_torch", "to_torch"]


def from_torch(q: ScaledTensor) -> ScaledArray:
    """The array whose memory is that of a :class:`blockscale.ScaledTensor`; JAX takes for granted
    that nothing is written to it any more.

    >>> q = bsj.from_torch(bs.quantize(torch.randn(256, 512), "nvfp4"))

    Raises TypeError for what is none.
    """
    if type(q).__name__ != "ScaledTensor":
        raise TypeError(f"q: got {type(q).__name__}; expected a blockscale.ScaledTensor")
    data, data_turned = _row_major(q.qdata)
    scales = q.qscale
    if get_layout(q.layout_name).word is None:  # tiles are bytes there
        scales = scales.view(q.format.scale.dtype)
    scale, scale_turned = _row_major(scales)
    size = q.shape[q.axis]
    whole = not q.groups_apart if q.k_grouped else size % q.format.block_size == 0
    return ScaledArray(
        data,
        scale,
        None if q.global_scale is None else _scalar(q.global_scale, q.shape),
        format=q.format_name,
        axis=q.axis,
        layout=q.layout_name,
        length=None if whole else size,
        turned=(data_turned, scale_turned),
        dtype=numpy_dtype(q.dtype),
        offsets=None if q.offsets is None else jnp.from_dlpack(q.offsets.detach()),
        k_grouped=q.k_grouped,
    )


def to_torch(q: ScaledArray) -> ScaledTensor:
    """The tensor whose memory is that of ``q``: do not write to it, JAX's arrays do not change.

    >>> bs.gemm(x, bsj.to_torch(q).mT)

    Raises TypeError for what is no :class:`ScaledArray`, ImportError without torch.
    """
    import torch
    from torch.utils.dlpack import from_dlpack

    from ..tensor import ScaledTensor

    check_scaled("q", q)
    data, scale = from_dlpack(q.data), from_dlpack(q.scale)
    data = data.mT if q.turned[0] else data
    return ScaledTensor(
        data.view(q.kind.element.dtype),
        scale.mT if q.turned[1] else scale,
        format=q.kind,
        shape=torch.Size(q.shape),
        axis=q.axis,
        dtype=torch_dtype(q.dtype),
        layout=q.layout,
        global_scale=None if q.global_scale is None else from_dlpack(q.global_scale),
        offsets=None if q.offsets is None else from_dlpack(q.offsets),
        k_grouped=q.k_grouped,
    )


def _scalar(x: Any, shape: Any) -> jax.Array:
    """Without dimensions, unless there is one for each matrix."""
    return jnp.from_dlpack(x.detach() if x.shape == shape[:-2] else x.detach().reshape(()))


def _row_major(x: Any) -> tuple[jax.Array, bool]:
    """An array, and whether it is the transpose of ``x``."""
    x = x.detach()
    turned = x.dim() > 1 and x.stride(-1) != 1 and x.mT.is_contiguous()
    lies = x.mT if turned else x.contiguous()
    if "float4" in str(lies.dtype):  # of which DLPack knows none, or another one
        lies = lies.view(torch_dtype(UINT8))
    return jnp.from_dlpack(lies), turned
