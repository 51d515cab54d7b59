"""Quantization and its inverse, on plain tensors. Bytes of every kernel are compared with these."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import FP32, GROUP_TILE, Format, padded_groups
from ..philox import random_bits
from ..rounding import (
    FP32_INF,
    block_scale,
    decode,
    decode_scale,
    encode_magnitude,
    float32_bits,
    from_float32_bits,
    global_scale_from_amax,
    multiply,
    pack,
    unpack,
)
from ..seed import Numbers
from .scaling import Blocks, least_error, ms_eden

__all__ = ["apart_position", "dequantize", "global_scale", "quantize"]


class Scaling(NamedTuple):
    """How scales of blocks are chosen, of blocks of ``rotated`` elements that were transformed;
    ``turned``: of columns, taken for rows."""

    name: str
    rotated: int
    turned: bool


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
            scale_rounding,
            nonfinite,
            None if global_scale is None else _bits(global_scale, 4),
            None if noise is None else noise[..., start:end],
            Scaling(scaling, rotated, turned=axis == -2),
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
    return stored, _store_scale(scale, format)


def _quantize_blocks(
    x: Tensor,
    format: Format,
    scale_rounding: str,
    nonfinite: str,
    global_scale: Tensor | None,
    noise: Tensor | None,
    scaling: Scaling,
) -> tuple[Tensor, Tensor]:
    """uint8 codes, padded along the last axis, and int64 scale codes, blocks along that axis."""
    element, rows, columns = format.element, x.shape[-2] if x.ndim > 1 else 1, x.shape[-1]
    bits = _blocks(float32_bits(x), format)
    noise = None if noise is None else _blocks(noise, format)
    magnitude, sign = bits & 0x7FFFFFFF, (bits >> 31) * element.sign_code
    is_nan, is_inf = magnitude > FP32_INF, magnitude == FP32_INF

    finite = torch.where(is_nan | is_inf, 0, magnitude)
    amax = finite.amax((-3, -1), keepdim=True)
    if scaling.name == "amax":
        scale, reciprocal = block_scale(amax, format, scale_rounding, global_scale)
        codes = encode_magnitude(multiply(finite, reciprocal), element, noise)
    else:
        blocks = Blocks(finite, amax, format, global_scale, noise, scaling.turned)
        codes, scale = (
            ms_eden(blocks, scaling.rotated)
            if scaling.name == "ms_eden"
            else least_error(blocks, scaling.name)
        )
    codes = codes | sign

    block_nan, block_inf = is_nan.any(-1, True).any(-3, True), is_inf.any(-1, True).any(-3, True)
    nan = element.max_code if element.nan_code is None else element.nan_code
    if nonfinite == "propagate":  # the block's scale says NaN; so does each element that can
        bad = block_nan | block_inf
        scale = torch.where(bad, format.scale.nan_code, scale)
        codes = torch.where(bad, element.nan_code or 0, codes)
    else:  # as Transformer Engine: a NaN stays alone, an infinity saturates and takes the scale
        scale = torch.where(block_inf, format.scale.max_code, scale)
        codes = torch.where(block_inf, 0, codes)
        codes = torch.where(is_inf, element.max_code | sign, codes)
        codes = torch.where(is_nan, nan, codes)

    padded = codes.flatten(-2).flatten(-3, -2)[..., :rows, :]
    scale = scale.squeeze(-1).squeeze(-2)
    lead = x.shape[:-1]
    padded = padded.reshape(*lead, -1) if columns else padded.reshape(*lead, 0)
    return padded.to(torch.uint8), scale if x.ndim > 1 else scale.squeeze(0)


def _blocks(bits: Tensor, format: Format) -> Tensor:
    """(..., M, K) -> (..., row blocks, rows, column blocks, columns), padded with zeros."""
    rows, columns = format.block
    bits = bits if bits.ndim > 1 else bits.unsqueeze(0)
    down, right = -bits.shape[-2] % rows, -bits.shape[-1] % columns
    bits = torch.nn.functional.pad(bits, (0, right, 0, down))
    m, k = bits.shape[-2:]
    return bits.reshape(*bits.shape[:-2], m // rows, rows, k // columns, columns)


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


def _store_scale(code: Tensor, format: Format) -> Tensor:
    if format.scale is FP32:
        return from_float32_bits(code)
    return code.to(torch.uint8).view(format.scale.dtype)


def global_scale(x: Tensor, format: Format, scaling: str = "amax") -> Tensor:
    """The fp32 scalar ``amax / (448 * element.max)`` over the finite elements of ``x``; 1 if 0.

    Other ``scaling`` than by amax leaves room above the largest scale (:data:`rounding.ROOM`).
    """
    magnitude = float32_bits(x) & 0x7FFFFFFF
    amax = torch.where(magnitude >= FP32_INF, 0, magnitude).amax()
    return global_scale_from_amax(from_float32_bits(amax), format, scaling)


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
    rows, columns = format.block
    m, k = (shape[-2] if len(shape) > 1 else 1), shape[-1]
    values = decode(unpack(data, format.element), format.element)
    block = torch.arange(values.shape[-1], device=data.device) // columns
    if offsets is not None:
        position = apart_position(offsets, k)
        block = position // columns
        if values.shape[-1] != k:
            values = values[..., position]
    per_element = float32_bits(decode_scale(scale, format.scale))[..., block]
    if len(shape) > 1:
        per_element = per_element[..., torch.arange(m, device=data.device) // rows, :]
    bits = multiply(float32_bits(values), per_element)
    if global_scale is not None:
        bits = multiply(bits, _bits(global_scale, 2))
    if offsets is not None:  # past the last group there is no block; a neighbour's may be NaN
        bits = torch.where(torch.arange(k, device=data.device) < offsets[-1], bits, 0)
    out = from_float32_bits(bits)[..., :k]
    return out.mT if axis == -2 else out


def _bits(global_scale: Tensor, dims: int) -> Tensor:
    """Of a scalar, or of one for each matrix, which has so many dimensions."""
    bits = float32_bits(global_scale)
    return bits.reshape(*bits.shape, *[1] * dims) if bits.numel() > 1 else bits.reshape(())


def apart_position(offsets: Tensor, k: int) -> Tensor:
    """Where each of ``k`` elements lies whose groups are moved apart; those of none, anywhere."""
    element = torch.arange(k, device=offsets.device)
    group = torch.searchsorted(offsets.to(torch.int64), element, right=True)
    ends = torch.cat((offsets.new_zeros(1), offsets)).to(torch.int64)
    start = ends[group]
    position = (start // GROUP_TILE + group) * GROUP_TILE + element - start
    return position.clamp(max=padded_groups(k, len(offsets)) - 1)
