"""Quantization and its inverse, on plain tensors. Bytes of every kernel are compared with these."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ..formats import FP32, Format
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
    random_bits,
    unpack,
)

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
    seed: int | None = None,
    k_major: bool = False,
) -> tuple[Tensor, Tensor]:
    """Data and compact scales of ``x`` (..., M, K), blocked along ``axis`` (-1 or -2).

    The contraction is padded with zeros to whole blocks; where the data is packed it is packed
    along the contraction. Shapes: ``format.data_shape`` and ``format.scale_shape``. Strides:
    contiguous, or ``mT`` of a contiguous tensor where ``format.turned``.
    """
    noise = None if seed is None else random_bits(seed, x)
    if axis == -2:  # from here on the contraction is the last axis
        x, noise = x.mT, noise.mT if noise is not None else None
    bounds = [0, x.shape[-1]] if offsets is None else [0, *offsets.tolist()]
    data, scales = [], []
    for start, end in pairwise(bounds):
        codes, scale = _quantize_blocks(
            x[..., start:end],
            format,
            scale_rounding,
            nonfinite,
            None if global_scale is None else float32_bits(global_scale),
            None if noise is None else noise[..., start:end],
        )
        data.append(codes if offsets is None else codes[..., : end - start])
        scales.append(scale)
    if offsets is not None:  # what follows the last group belongs to nobody
        data.append(data[0].new_zeros(*x.shape[:-1], x.shape[-1] - bounds[-1]))
    codes = torch.cat(data, -1)
    scale = scales[0] if offsets is None else _place_groups(scales, bounds, x.shape[-1], format)
    stored = pack(codes, format.element)
    if axis == -2:
        # packed data stays contraction-major, as FP4 units read it; 8-bit data is as x is
        stored = stored.mT if format.turned(axis, k_major) else stored.mT.contiguous()
        scale = scale.mT.contiguous()
    return stored, _store_scale(scale, format)


def _quantize_blocks(
    x: Tensor,
    format: Format,
    scale_rounding: str,
    nonfinite: str,
    global_scale: Tensor | None,
    noise: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """uint8 codes, padded along the last axis, and int64 scale codes, blocks along that axis."""
    element, rows, columns = format.element, x.shape[-2] if x.ndim > 1 else 1, x.shape[-1]
    bits = _blocks(float32_bits(x), format)
    noise = None if noise is None else _blocks(noise, format)
    magnitude, sign = bits & 0x7FFFFFFF, (bits >> 31) * element.sign_code
    is_nan, is_inf = magnitude > FP32_INF, magnitude == FP32_INF

    finite = torch.where(is_nan | is_inf, 0, magnitude)
    amax = finite.amax((-3, -1), keepdim=True)
    scale, reciprocal = block_scale(amax, format, scale_rounding, global_scale)
    codes = encode_magnitude(multiply(finite, reciprocal), element, noise) | sign

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


def _place_groups(scales: list[Tensor], bounds: list[int], k: int, format: Format) -> Tensor:
    """Scales of groups along the contraction, each at the block that its first row dictates."""
    blocks = k // format.block_size + len(scales)
    out = scales[0].new_zeros(*scales[0].shape[:-1], blocks)
    for i, scale in enumerate(scales):
        first = bounds[i] // format.block_size + i
        out[..., first : first + scale.shape[-1]] = scale
    return out


def _store_scale(code: Tensor, format: Format) -> Tensor:
    if format.scale is FP32:
        return from_float32_bits(code)
    return code.to(torch.uint8).view(format.scale.dtype)


def global_scale(x: Tensor, format: Format) -> Tensor:
    """The fp32 scalar ``amax / (448 * element.max)`` over the finite elements of ``x``; 1 if 0."""
    magnitude = float32_bits(x) & 0x7FFFFFFF
    amax = torch.where(magnitude >= FP32_INF, 0, magnitude).amax()
    return from_float32_bits(global_scale_from_amax(amax, format))


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
        block = _grouped_block_index(offsets, k, columns).clamp(max=scale.shape[-1] - 1)
    per_element = decode_scale(scale, format.scale)[..., block]
    if len(shape) > 1:
        per_element = per_element[..., torch.arange(m, device=data.device) // rows, :]
    bits = multiply(float32_bits(values), per_element)
    if global_scale is not None:
        bits = multiply(bits, float32_bits(global_scale))
    if offsets is not None:  # past the last group there is no block; a neighbour's may be NaN
        bits = torch.where(torch.arange(k, device=data.device) < offsets[-1], bits, 0)
    out = from_float32_bits(bits)[..., :k]
    return out.mT if axis == -2 else out


def _grouped_block_index(offsets: Tensor, k: int, block_size: int) -> Tensor:
    """Index of the block that holds each of the ``k`` positions when blocks start with groups."""
    position = torch.arange(k, device=offsets.device)
    group = torch.searchsorted(offsets.to(torch.int64), position, right=True)
    ends = torch.cat((offsets.new_zeros(1), offsets)).to(torch.int64)
    start = ends[group]
    return start // block_size + group + (position - start) // block_size
