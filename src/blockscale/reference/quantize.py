"""Quantization and its inverse, on plain tensors. Bytes of every kernel are compared with these."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..apart import apart_position
from ..blocks import decode_blocks, encode_blocks, finite_amax, store_scale
from ..formats import GROUP_TILE, Format, padded_groups
from ..philox import random_bits
from ..rounding import (
    float32_bits,
    from_float32_bits,
    global_scale_from_amax,
    pack,
    unpack,
)
from ..scaling import Scaling
from ..seed import Numbers

__all__ = ["dequantize", "global_scale", "quantize"]


def quantize(
    x: Tensor,
    format: Format,
    *,
    axis: int = -1,
    scale_rounding: str = "rceil",
    nonfinite: str = "propagate",
    global_scale: Tensor | None = None,
    offsets: Tensor | None = None,
    seed: int | Numbers | None = None,
    k_major: bool = False,
    scaling: str = "amax",
    rotated: int = 0,
) -> tuple[Tensor, Tensor]:
    """Data and compact scales of ``x`` (..., M, K), blocked along ``axis`` (-1 or -2).

    The contraction is padded with zeros to whole blocks; where the data is packed it is packed
    along the contraction. Shapes: ``format.data_shape`` and ``format.scale_shape``. Strides:
    contiguous, or ``mT`` of a contiguous tensor where ``format.turned``.

    With ``offsets`` along the contraction each group has what it has alone, padded, and the groups
    are moved apart as ``formats.padded_groups`` says; but 8-bit data, unless it is ``k_major``,
    stays where it is. ``scaling``: see :class:`blockscale.Quantization`; ``rotated``: of blocks
    that were transformed before.
    """
    noise = None if seed is None else random_bits(seed, x)
    if axis == -2:  # from here on the contraction is the last axis
        x, noise = x.mT, noise.mT if noise is not None else None
    bounds = [0, x.shape[-1]] if offsets is None else [0, *offsets.tolist()]
    groups = [
        _quantize_blocks(
            x[..., start:end],
            format,
            None if noise is None else noise[..., start:end],
            Scaling(scaling, rotated, turned=axis == -2),
            scale_rounding=scale_rounding,
            nonfinite=nonfinite,
            global_scale=None if global_scale is None else _bits(global_scale, 4),
        )
        for start, end in pairwise(bounds)
    ]
    turned = format.turned(axis, k_major)
    codes, scale = (
        groups[0]
        if offsets is None
        else _move_apart(groups, bounds, x.shape[-1], format.block_size)
    )
    if offsets is not None and not (turned or format.element.bits < 8):
        codes = codes[..., apart_position(offsets, x.shape[-1])]
        codes[..., bounds[-1] :] = 0  # what follows the last group belongs to nobody
    stored = pack(codes.contiguous(), format.element)
    if axis == -2:
        # packed data stays contraction-major, as FP4 units read it; 8-bit data is as x is
        stored = stored.mT if turned else stored.mT.contiguous()
        scale = scale.mT.contiguous()
    return stored, store_scale(scale, format)


def _quantize_blocks(
    x: Tensor, format: Format, noise: Tensor | None, scaling: Scaling, **how: Any
) -> tuple[Tensor, Tensor]:
    choose = scaling.chooser(format, how["global_scale"], noise)
    return encode_blocks(x, format, noise=noise, choose=choose, **how)


def _move_apart(
    groups: list[tuple[Tensor, Tensor]], bounds: list[int], k: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Codes and scales of groups along the contraction, each where its first row dictates."""
    parts = []
    for each, size in zip(zip(*groups, strict=True), (1, block_size), strict=True):
        out = each[0].new_zeros(*each[0].shape[:-1], padded_groups(k, len(groups)) // size)
        for i, part in enumerate(each):
            first = (bounds[i] // GROUP_TILE + i) * GROUP_TILE // size
            out[..., first : first + part.shape[-1]] = part
        parts.append(out)
    return parts[0], parts[1]


def global_scale(x: Tensor, format: Format, scaling: str = "amax") -> Tensor:
    """The fp32 scalar ``amax / (448 * element.max)`` over the finite elements of ``x``; 1 if 0.

    Other ``scaling`` than by amax leaves room above the largest scale (:data:`rounding.ROOM`).
    """
    return global_scale_from_amax(finite_amax(x), format, scaling)


def dequantize(
    data: Tensor,
    scale: Tensor,
    format: Format,
    *,
    shape: torch.Size,
    axis: int = -1,
    global_scale: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """fp32 (element * block_scale) * global_scale, each product rounded once; padding cut off."""
    if axis == -2:
        data, scale, shape = data.mT, scale.mT, torch.Size((*shape[:-2], shape[-1], shape[-2]))
    k, block, codes = shape[-1], None, unpack(data, format.element)
    if offsets is not None:
        position = apart_position(offsets, k)
        block = position // format.block_size
        if codes.shape[-1] != k:
            codes = codes[..., position]
    scalar = None if global_scale is None else _bits(global_scale, 2)
    bits = decode_blocks(codes, scale, format, global_scale=scalar, block=block)
    if offsets is not None:  # past the last group there is no block; a neighbour's may be NaN
        bits = torch.where(torch.arange(k, device=data.device) < offsets[-1], bits, 0)
    out = from_float32_bits(bits)[..., :k]
    return out.mT if axis == -2 else out


def _bits(global_scale: Tensor, dims: int) -> Tensor:
    """Of a scalar, or of one for each matrix, which has so many dimensions."""
    bits = float32_bits(global_scale)
    return bits.reshape(*bits.shape, *[1] * dims) if bits.numel() > 1 else bits.reshape(())
