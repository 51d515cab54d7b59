"""What quantization did to a tensor, as sums that grow chunk by chunk."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..formats import Scale
from ..measure import error_sums
from ..rounding import decode_scale
from ..stored import is_per_matrix
from ..tensor import ScaledTensor

__all__ = ["ErrorStatistics", "Exponents", "ValueStatistics", "error_bin_edges"]

# Bins of the relative error: half octaves, [2^e, 1.5 * 2^e) and [1.5 * 2^e, 2^(e+1)), from 2^-16
# (all that is smaller, but not 0, is in the first bin) to 2^1. Their number is read off the bits of
# the fp32 ratio: no logarithm whose last digit depends on the machine.
_FIRST_EXPONENT, _BINS = -16, 34
_LARGEST = ("max_abs", "max_rel")  # of all chunks; the other numbers are sums
# Elements that are surveyed together: they stay in the cache. numpy, because torch's threads wait
# for each other at every one of these small steps.
_PIECE = 1 << 16

Array = NDArray[np.float32]


def error_bin_edges() -> list[float]:
    """The 35 edges of the bins of the relative error."""
    return [math.ldexp(1.0 + (i % 2) / 2, _FIRST_EXPONENT + i // 2) for i in range(_BINS + 1)]


@dataclass
class Exponents:
    """A histogram of floor(log2(|value|)), with zeros and non-finite values apart."""

    counts: Counter[int] = field(default_factory=Counter)
    zeros: int = 0
    nonfinite: int = 0

    def add(self, values: Array, counts: NDArray[np.int64] | None = None) -> None:
        """Count fp32 values; with ``counts``, each as often as that says."""
        magnitude = values.reshape(-1).view(np.int32) & 0x7FFFFFFF
        fields = np.bincount(magnitude >> 23, counts, minlength=256).astype(np.int64).tolist()
        self.nonfinite += fields[255]
        self.counts.update({e - 127: n for e, n in enumerate(fields[1:255], 1) if n})
        if fields[0]:  # zero or, below 2^-126, subnormal: the exponent is that of the highest bit
            small = magnitude < 1 << 23
            highest = np.frexp(magnitude[small].astype(np.float64))[1]
            lengths = np.bincount(highest, None if counts is None else counts[small], minlength=24)
            self.zeros += int(lengths[0])
            self.counts.update({n - 150: int(c) for n, c in enumerate(lengths[1:], 1) if c})

    def merge(self, other: Exponents) -> None:
        """Add the counts of another."""
        self.counts.update(other.counts)
        self.zeros += other.zeros
        self.nonfinite += other.nonfinite

    def to_json(self) -> dict[str, Any]:
        """JSON with the exponents ascending."""
        counts = {str(e): n for e, n in sorted(self.counts.items())}
        return {"counts": counts, "zeros": self.zeros, "nonfinite": self.nonfinite}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Exponents:
        """The inverse of :meth:`to_json`. ValueError where ``data`` is something else."""
        counts = Counter({int(e): int(n) for e, n in data["counts"].items()})
        if not all(-149 <= e <= 127 and n > 0 for e, n in counts.items()):
            raise ValueError("an exponent is not one of fp32")
        return cls(counts, int(data["zeros"]), int(data["nonfinite"]))


@dataclass
class ErrorStatistics:
    """The difference between a tensor and its dequantized values, in sums that grow.

    Attributes are those of :class:`blockscale.measure.ErrorSums` but for its bins, and these:
        exact: elements without any difference.
        error_bins: how often each relative error occurs, see :func:`error_bin_edges`; exact ones
            and those of x = 0 are left out.
        scales: exponents of block scale times global scale.
    """

    elements: int = 0
    signal: float = 0.0
    noise: float = 0.0
    max_abs: float = 0.0
    max_rel: float = 0.0
    exact: int = 0
    zeros: int = 0
    flushed: int = 0
    saturated: int = 0
    nonfinite: int = 0
    error_bins: list[int] = field(default_factory=lambda: [0] * _BINS)
    scales: Exponents = field(default_factory=Exponents)

    @property
    def sqnr_db(self) -> float | None:
        """10 log10(signal / noise); None where nothing was lost or there is no signal."""
        if self.noise == 0 or self.signal == 0:
            return None
        return 10 * math.log10(self.signal / self.noise)

    def add(self, x: Tensor, q: ScaledTensor) -> None:
        """Compare a chunk ``x`` (..., rows, K) with its quantized form (compact, axis -1), by
        :func:`blockscale.measure.error_sums`."""
        sums = error_sums(x, q)._asdict()
        bins = sums.pop("bins")
        first = 2 * (127 + _FIRST_EXPONENT)
        lowest, *others = bins[first : first + _BINS]
        counts = [lowest + sum(bins[1:first]), *others]
        chunk = ErrorStatistics(**sums, exact=bins[0], error_bins=counts)
        chunk.scales.add(*_scales(q))
        self.merge(chunk)

    def merge(self, other: ErrorStatistics) -> None:
        """Add another tensor's sums."""
        for name, value in vars(other).items():
            if isinstance(value, int | float):
                mine = getattr(self, name)
                setattr(self, name, max(mine, value) if name in _LARGEST else mine + value)
        self.error_bins = [a + b for a, b in zip(self.error_bins, other.error_bins, strict=True)]
        self.scales.merge(other.scales)

    def to_json(self) -> dict[str, Any]:
        """JSON; sums with 12 digits, since the order of additions decides about the rest."""
        out: dict[str, Any] = {"sqnr_db": self.sqnr_db and round(self.sqnr_db, 4)}
        for name, value in vars(self).items():
            out[name] = float(f"{value:.12g}") if isinstance(value, float) else value
        return {**out, "scales": self.scales.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ErrorStatistics:
        """The inverse of :meth:`to_json`. ValueError where ``data`` is something else."""
        try:
            numbers = {name: type(v)(data[name]) for name, v in vars(cls()).items() if v == 0}
            bins = [int(n) for n in data["error_bins"]]
            if len(bins) != _BINS:
                raise ValueError(f"{len(bins)} error_bins instead of {_BINS}")
            if not all(0 <= n < math.inf for n in (*numbers.values(), *bins)):
                raise ValueError("a number is negative or not finite")
            return cls(**numbers, error_bins=bins, scales=Exponents.from_json(data["scales"]))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"these are no error statistics: {error!r}") from None


@lru_cache
def _values_of_codes(scale: Scale) -> Tensor:
    """fp32, of scales of one byte."""
    codes = torch.arange(256, dtype=torch.uint8).view(scale.dtype)
    values: Tensor = decode_scale(codes, scale)
    return values


def _scales(q: ScaledTensor) -> tuple[Array, NDArray[np.int64] | None]:
    """fp32 block scale times global scale, and how often each occurs. Neither is subnormal where
    there are two."""
    if is_per_matrix(q.global_scale, q.shape):
        scales = decode_scale(q.scale, q.format.scale)
        return (scales * q.global_scale[..., None, None]).numpy(), None
    stored, counts = q.scale.flatten(), None
    if stored.dtype.itemsize == 1:
        frequencies = torch.bincount(stored.view(torch.uint8), minlength=256)
        codes = frequencies.nonzero().flatten()
        scales, counts = _values_of_codes(q.format.scale)[codes], frequencies[codes].numpy()
    else:
        scales = decode_scale(stored, q.format.scale)
    return (scales if q.global_scale is None else scales * q.global_scale).numpy(), counts


@dataclass
class ValueStatistics:
    """The values of a floating-point tensor: amax and the exponents that occur."""

    elements: int = 0
    amax: float = 0.0
    exponents: Exponents = field(default_factory=Exponents)

    def add(self, x: Tensor) -> None:
        """Count a chunk in float32, bfloat16 or float16."""
        values = x.float().flatten().numpy()
        self.elements += x.numel()
        for start in range(0, len(values), _PIECE):
            piece = values[start : start + _PIECE]
            self.exponents.add(piece)
            self.amax = max(self.amax, float(np.abs(piece[np.isfinite(piece)]).max(initial=0)))

    def to_json(self) -> dict[str, Any]:
        """JSON with the exponents ascending."""
        return {**vars(self), "exponents": self.exponents.to_json()}
