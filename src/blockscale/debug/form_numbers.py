"""Numbers of what a watched step has kept: computed on the device for many tensors at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..error_sums import SLACK
from ..formats import FP32, UE4M3, Format, formats
from ..kernels.common import watch_vector as at
from .form_samples import About, Picks, Sample, counted

__all__ = ["Blocks", "Measured", "compare", "evaluate"]

_COMPARED = at.ELEMENT - at.SUMS_AT  # numbers of what was compared
_MASK = 0x7FFFFFFF


class Measured(NamedTuple):
    """A form, and the fp64 vector of its numbers, as ``kernels.common.watch_vector`` has them; a
    tensor is still on its device."""

    about: About
    vector: np.ndarray | Tensor


def evaluate(samples: Sequence[Sample]) -> list[Measured]:
    """Compute the numbers of samples in any formats, of those alike at once."""
    alike: dict[Any, list[int]] = {}
    for i, sample in enumerate(samples):
        picks = sample.picks
        key = None if picks is None else (sample.about.format, picks.x.shape, picks.x.dtype)
        which = key, sample.histogram.device, sample.limits is None, sample.first is None
        alike.setdefault(which, []).append(i)
    vectors: dict[int, Tensor] = {}
    for (key, *_), members in alike.items():
        some = [samples[i] for i in members]
        wide: Any = {"dtype": torch.float64, "device": some[0].histogram.device}
        if key is None:
            compared = torch.full((len(some), _COMPARED + 2), math.nan, **wide)
        else:
            chosen = [s.picks for s in some if s.picks is not None]
            compared = _compared(some[0].about.format, chosen, finite=some[0].first is None)
        histograms = torch.stack([sample.histogram for sample in some])
        scalars = [
            _column(each, len(some), wide) for each in zip(*map(_scalars, some), strict=True)
        ]
        joined = torch.cat((*scalars, histograms.to(**wide), compared), 1)
        vectors |= dict(zip(members, joined, strict=True))
    return [Measured(sample.about, vectors[i]) for i, sample in enumerate(samples)]


def _compared(format: Format, picks: Sequence[Picks], *, finite: bool) -> Tensor:
    """Of the blocks of each, and the first element that is not finite: its number, and itself."""
    height = format.block[0]
    x = torch.stack([p.x for p in picks]).float()
    n = x.shape[1] - height
    data, scale = (torch.stack([p[i] for p in picks])[:, :n] for i in (1, 2))
    scalar = None
    if format.has_global_scale:
        scalar = torch.stack([p.global_scale.expand(len(p.x))[:n] for p in picks])
    there = torch.stack([p.there for p in picks])
    blocks = Blocks(x[:, :n].contiguous(), data, scale, scalar, there)
    sums = compare(format, blocks, finite=finite)
    first = sums.new_full((len(picks), 2), math.nan) if finite else _first(x[:, n:])
    return torch.cat((sums, first), 1)


def _scalars(sample: Sample) -> tuple[Tensor | None, ...]:
    scalar, amax = sample.global_scale, None
    if scalar is not None and scalar.numel() > 1:
        scalar = None
    if sample.limits is not None:
        low, high = sample.limits
        amax = torch.maximum(-low, high)
    return amax, sample.first, scalar


def _column(numbers: Sequence[Tensor | None], count: int, wide: Any) -> Tensor:
    found = [number.reshape(()) for number in numbers if number is not None]
    if len(found) < count:
        return torch.full((count, 1), math.nan, **wide)
    return torch.stack(found).to(**wide)[:, None]


class Blocks(NamedTuple):
    """Blocks of several forms beside what they were made of: ``x`` (forms, n, B) fp32, ``data``
    (forms, n, bytes), ``scale`` (forms, n) as it is stored, ``scalar`` (forms,) or (forms, n), and
    ``there`` (forms, n), elements that are no padding."""

    x: Tensor
    data: Tensor
    scale: Tensor
    scalar: Tensor | None
    there: Tensor


def compare(format: Format, blocks: Blocks, *, finite: bool = False) -> Tensor:
    """Sums over the blocks of each form, and how often magnitudes occur: (forms, 30).
    ``finite``: whether all are known to be."""
    x, _, scale, scalar, compared = blocks
    count, n, size = x.shape
    values = _dequantized(format, blocks).view(count, n, size)
    limit = _decoded(scale, format)[..., None] * (format.element.max * SLACK)
    if scalar is not None:
        factor = scalar.view(count, -1, 1)
        values, limit = values * factor, limit * factor
    if not finite:
        bad = limit.isnan()
        x, values = x.masked_fill(bad, 0), values.masked_fill(bad, 0)
        compared = compared * ~bad[..., 0]
    compared = compared.sum(1)
    magnitude = x.view(torch.int32).bitwise_and(_MASK).view(torch.float32)
    octaves = _octaves(magnitude)
    zeros = octaves[:, 0] - (n * size - compared)
    over = (1, 2)
    flushed = (values == 0).count_nonzero(over) - octaves[:, 0]
    saturated = (magnitude > limit).count_nonzero(over)
    sums = compared, _square(x), _square(values - x), zeros, flushed, saturated
    return torch.cat((torch.stack([each.to(torch.float64) for each in sums], 1), octaves[:, 1:]), 1)


def _dequantized(format: Format, blocks: Blocks) -> Tensor:
    """Values of all blocks, a row each; without a global scale."""
    data, scale, size = blocks.data.flatten(0, 1), blocks.scale.flatten(), format.block_size
    lined = next(
        f
        for f in formats.values()
        if (f.element, f.scale, f.block) == (format.element, format.scale, (1, size))
    )
    one = torch.ones((), device=data.device) if format.has_global_scale else None
    how = lined.name, [len(data), size], -1
    given = data.view(torch.uint8), scale[:, None]
    return torch.ops.blockscale.dequantize(*given, *how, one, None, torch.float32)


def _square(x: Tensor) -> Tensor:
    """Sums of squares; in fp32 those of small gradients would be 0."""
    return x.to(torch.float64).square().sum((-2, -1))


def _decoded(scale: Tensor, format: Format) -> Tensor:
    """fp32 values of scales as they are stored."""
    if format.scale is FP32:
        return scale
    if format.scale is UE4M3:
        return scale.view(torch.float8_e4m3fn).float()
    return scale.view(torch.float8_e8m0fnu).float()


def _octaves(magnitude: Tensor) -> Tensor:
    """How many are zero, and how often each power of two occurs in the ratio to the largest of the
    block."""
    ratio = magnitude / magnitude.amax(-1, keepdim=True)
    bins = 128 - (ratio.view(torch.int32) >> 23)  # 1 for a ratio of 1; of NaN, in zeros, negative
    bins = bins.clamp_(0, at.OCTAVES)
    bins *= magnitude > 0
    count, width = len(bins), at.OCTAVES + 1
    bins += torch.arange(count, device=bins.device, dtype=torch.int32)[:, None, None] * width
    return counted(bins.flatten(), count * width).view(count, width).to(torch.float64)


def _first(last: Tensor) -> Tensor:
    """Of (count, height, size) the number of the first element that is not finite, and itself."""
    flat = last.flatten(1)
    order = torch.arange(flat.shape[1], device=flat.device)
    first = torch.where(flat.isfinite(), flat.shape[1], order).amin(1, keepdim=True)
    value = flat.gather(1, first.clamp(max=flat.shape[1] - 1))
    return torch.cat((first.to(torch.float64), value.to(torch.float64)), 1)
