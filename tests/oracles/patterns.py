"""Inputs on which casts go wrong: all halves, random bits, the neighbourhood of boundaries."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .exact import SPECS, Spec, value_of


def every_half(dtype: torch.dtype) -> Tensor:
    """All 65,536 bit patterns of bfloat16 or float16."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def random_bits(n: int, seed: int) -> NDArray:
    """fp32 with uniform bits: every exponent, NaNs, infinities and subnormals included."""
    bits = np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32)
    return bits.view(np.float32)


def random_near(spec: Spec, n: int, seed: int) -> NDArray:
    """fp32 with random sign and mantissa, exponents from below to above the range."""
    rng = np.random.default_rng(seed)
    low, high = spec.min_exponent - spec.mantissa_bits - 3, spec.max_exponent + 2
    field = rng.integers(low + 127, high + 127, n, dtype=np.uint32)
    bits = rng.integers(0, 2**32, n, dtype=np.uint32) & np.uint32(0x807FFFFF)
    return (bits | field << 23).view(np.float32)


def with_neighbours(x: NDArray) -> NDArray:
    """Each fp32 value, the next below and the next above, with both signs."""
    x = x.astype(np.float32)
    inf = np.float32(np.inf)
    near = np.concatenate((x, np.nextafter(x, -inf), np.nextafter(x, inf)))
    return np.concatenate((near, -near))


def boundaries(name: str) -> NDArray:
    """Where the cast to an element changes: every value, midpoint and overflow, with neighbours."""
    spec = SPECS[name]
    codes = np.arange(spec.sign, dtype=np.uint8)
    values = value_of(codes, spec)
    values = values[values <= spec.max]
    above = 2 * values[-1] - values[-2]  # the value after the largest, if the format had one
    values = np.append(values, above)
    return with_neighbours(np.concatenate((values, (values[1:] + values[:-1]) / 2)))


def scale_boundaries(name: str) -> NDArray:
    """Block maxima where a mode changes its byte, at every exponent of fp32, with neighbours."""
    spec = SPECS[name]
    significands = np.array(
        [1.0, spec.max / 2.0**spec.max_exponent, 2.0 - 2.0 ** -(spec.mantissa_bits + 1)]
    )
    powers = np.ldexp(1.0, np.arange(-149, 128))
    return np.abs(with_neighbours((significands[:, None] * powers).ravel()))
