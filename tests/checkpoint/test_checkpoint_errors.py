"""Statistics, against fp64 arithmetic that is written down as one would define them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.checkpoint.statistics import (
    ErrorStatistics,
    Exponents,
    ValueStatistics,
    error_bin_edges,
)


def hard(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of many sizes, zeros of both signs among them."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(256, 384, generator=g) * torch.exp2(
        torch.randint(-9, 3, (256, 384), generator=g)
    )
    x[0, :40], x[1, ::3], x[2] = 0.0, -0.0, 1.0
    return x.to(dtype)


@pytest.mark.parametrize("format", list(bs.formats))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_the_definition(format: str, dtype: torch.dtype):
    x = hard(dtype)
    q = bs.quantize(x, format)
    stats = ErrorStatistics()
    for rows in (slice(0, 128), slice(128, 256)):
        stats.add(
            x[rows].unsqueeze(0),
            bs.quantize(x[rows].unsqueeze(0), format, global_scale=q.global_scale),
        )
    exact, values = x.double().numpy(), q.dequantize(torch.float32).double().numpy()
    error = np.abs(values - exact)
    assert stats.elements == exact.size
    assert math.isclose(stats.signal, (exact**2).sum(), rel_tol=1e-9)
    assert math.isclose(stats.noise, (error**2).sum(), rel_tol=1e-6)
    assert stats.sqnr_db is not None
    assert math.isclose(
        stats.sqnr_db, 10 * math.log10((exact**2).sum() / (error**2).sum()), rel_tol=1e-6
    )
    assert math.isclose(stats.max_abs, error.max(), rel_tol=1e-6)
    assert stats.exact == (error == 0).sum()
    assert stats.zeros == (values == 0).sum()
    assert stats.flushed == ((values == 0) & (exact != 0)).sum()
    assert stats.nonfinite == 0
    ratio = error[error > 0] / np.abs(exact[error > 0])
    assert math.isclose(stats.max_rel, ratio.max(), rel_tol=1e-6)
    assert sum(stats.error_bins) == (error > 0).sum()
    edges = np.array(error_bin_edges())
    counts, _ = np.histogram(ratio, [0, *edges[1:]])
    assert np.abs(counts - stats.error_bins).sum() < 20  # fp32 quotients at the edges
    rows, columns = q.format.block
    scale = q.scale.double() if q.global_scale is None else q.scale.double() * q.global_scale
    limit = (scale * q.format.element.max).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    assert stats.saturated == (np.abs(exact) > limit[:256, :384].numpy() * (1 + 2**-20)).sum()
    exponents = np.floor(np.log2(scale[scale > 0].numpy())).astype(int)
    assert dict(stats.scales.counts) == dict(
        zip(*np.unique(exponents, return_counts=True), strict=True)
    )
    assert stats.scales.zeros == (scale == 0).sum()


def test_floor_saturates_and_rceil_does_not():
    x = hard()
    counts = {}
    for rounding in ("rceil", "floor"):
        stats = ErrorStatistics()
        stats.add(x, bs.quantize(x, "mxfp8", scale_rounding=rounding))
        counts[rounding] = stats.saturated
    assert counts["rceil"] == 0
    assert counts["floor"] > 0


def test_not_a_number():
    x = torch.ones(2, 64)
    x[0, 3], x[1, 40] = float("nan"), float("-inf")
    stats = ErrorStatistics()
    stats.add(x, bs.quantize(x, "mxfp8"))
    assert (stats.elements, stats.nonfinite, stats.exact) == (
        64,
        64,
        64,
    )  # two whole blocks are NaN
    assert stats.sqnr_db is None
    assert stats.scales.nonfinite == 2
    assert math.isfinite(stats.signal)


def test_huge_and_tiny_values_neither_overflow_nor_vanish():
    for size in (3e38, 1e-44, 0.0):
        x = torch.full((4, 64), size)
        stats = ErrorStatistics()
        stats.add(x, bs.quantize(x, "mxfp8"))
        assert math.isfinite(stats.signal)
        assert stats.nonfinite == 0
        assert stats.elements == 256
    assert stats.sqnr_db is None


def test_merge_and_json():
    x = hard()
    whole, one, two = ErrorStatistics(), ErrorStatistics(), ErrorStatistics()
    q = bs.quantize(x, "nvfp4")
    whole.add(x, q)
    one.add(x[:128], bs.quantize(x[:128], "nvfp4", global_scale=q.global_scale))
    two.add(x[128:], bs.quantize(x[128:], "nvfp4", global_scale=q.global_scale))
    one.merge(ErrorStatistics.from_json(two.to_json()))
    a, b = one.to_json(), whole.to_json()
    for key in ("signal", "noise"):
        assert math.isclose(a.pop(key), b.pop(key), rel_tol=1e-10)
    assert a == b
    for damaged in ({}, {"elements": "x"}, [], {**b, "error_bins": [1]}, {**b, "scales": None}):
        with pytest.raises(ValueError, match="no error statistics"):
            ErrorStatistics.from_json(damaged)


def test_exponents_of_every_power_of_two():
    powers = np.ldexp(1.0, np.arange(-149, 128)).astype(np.float32)
    seen = Exponents()
    seen.add(
        np.concatenate([powers, -powers, powers[24:] * np.float32(1.5), np.zeros(3, np.float32)])
    )
    seen.add(np.array([np.nan, np.inf], np.float32))
    assert seen.counts == {e: 2 + (e >= -125) for e in range(-149, 128)}
    assert (seen.zeros, seen.nonfinite) == (3, 2)
    assert Exponents.from_json(seen.to_json()) == seen


def test_values():
    values = ValueStatistics()
    values.add(torch.tensor([0.0, -3.0, 0.75, float("inf"), float("nan")]).bfloat16())
    assert values.amax == 3.0
    assert dict(values.exponents.counts) == {1: 1, -1: 1}
    assert (values.exponents.zeros, values.exponents.nonfinite) == (1, 2)
